"""N-grams of words that documents share: how training text is kept clear of the text that tests (decontamination).

A word is what stands between white space and ASCII punctuation, in lower case, so that neither these nor capitals hide
a copy. What has fewer words than an n-gram is compared whole. Source of the rule, with 13 words: Brown et al. 2020,
appendix C.
"""

from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import numpy as np

from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile

HELD_OUT = ("valid", "test")
DEFAULT_NGRAM = 13
_LETTERS = bytes(byte if byte >= 128 or chr(byte).isalnum() else 0 for byte in range(256))
_FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd, so that no word's bits are lost
_WEIGHTS = np.multiply.accumulate(np.full(1 << 12, 0x9FB21C651E98DF25, np.uint64))  # by a letter's place in its word
_BYTES_AT_ONCE = 1 << 22
_DOCUMENTS_AT_ONCE = 4096
_MAX_TABLE_BITS = 27


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of some documents.

    Attributes:
        hashes: ``(n-grams,)``, uint64.
        documents: ``(n-grams,)``: number of the document that each stands in, ascending.
        starts: ``(n-grams,)``: number of its first word in the document.
    """

    hashes: np.ndarray
    documents: np.ndarray
    starts: np.ndarray


class NgramHasher:
    """Give each n-gram of words a number of 64 bits, the same on every machine.

    Args:
        size: words of an n-gram.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, documents: Sequence[str]) -> Ngrams:
        """Return the n-grams of documents; a document without a word has none."""
        texts = [_plain(document) for document in documents]
        codes, word_starts = _code_words(b"\0".join(texts))
        sizes = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
        lengths = np.diff(np.searchsorted(word_starts, np.cumsum(sizes)), prepend=0)
        # A shorter document is filled up with the code 0.
        padded = np.where((lengths > 0) & (lengths < self.size), self.size, lengths)
        owners = np.repeat(np.arange(len(texts)), padded)
        starts = np.arange(len(owners)) - (np.cumsum(padded) - padded)[owners]
        filled = np.zeros(len(owners), np.uint64)
        filled[starts < lengths[owners]] = codes
        hashes = np.zeros(max(len(owners) - self.size + 1, 0), np.uint64)
        for offset in range(self.size):
            hashes *= _FACTOR
            hashes += filled[offset : offset + len(hashes)]
        within = np.flatnonzero(starts[: len(hashes)] <= (padded - self.size)[owners[: len(hashes)]])
        return Ngrams(scrambled(hashes[within]), owners[within], starts[within])

    def spell(self, document: str, start: int) -> str:
        """Return the words of the n-gram that begins at a word of a document."""
        words = _plain(document).replace(b"\0", b" ").split()
        return b" ".join(words[start : start + self.size]).decode()


def _plain(document: str) -> bytes:
    """Return a text in lower case with zeros in the place of ASCII white space and punctuation."""
    return document.lower().encode().translate(_LETTERS)


def _code_words(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each word of what `_plain` returns, equal for equal words, and where each begins."""
    codes, starts, start = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    while start < len(text):
        end = text.find(b"\0", start + _BYTES_AT_ONCE)  # between two words
        end = len(text) if end < 0 else end
        piece = np.frombuffer(text, np.uint8, end - start, start)
        letters = np.flatnonzero(piece)
        first = np.flatnonzero(np.diff(letters, prepend=-2) > 1)  # of each word, among the letters
        if len(first):
            places = np.arange(len(letters)) - np.repeat(first, np.diff(first, append=len(letters)))
            weighed = _WEIGHTS[places & (len(_WEIGHTS) - 1)] * piece[letters]
            codes.append(scrambled(np.add.reduceat(weighed, first)))
            starts.append(letters[first] + start)
        start = end
    return np.concatenate(codes), np.concatenate(starts)


class NgramSet:
    """Tell which n-grams are among some.

    Args:
        hashes: uint64, ascending and distinct, as `distinct` returns them.
    """

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes = hashes
        bits = min(max(len(hashes), 1).bit_length() + 3, _MAX_TABLE_BITS)
        self._shift = np.uint64(64 - bits)
        # Nearly all others are ruled out by their leading bits, at a tenth of what a search costs.
        self._table = np.zeros(1 << bits, bool)
        self._table[hashes >> self._shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of ``hashes`` are in the set, ascending, and where each of these stands in it."""
        candidates = np.flatnonzero(self._table[hashes >> self._shift])
        if not len(candidates):
            return candidates, candidates
        places = np.searchsorted(self._hashes, hashes[candidates]).clip(max=len(self._hashes) - 1)
        equal = self._hashes[places] == hashes[candidates]
        return candidates[equal], places[equal]


def distinct(hashes: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays of hashes to one, ascending, each hash once."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))


def held_out_ngrams(stream: Stream, size: int) -> np.ndarray:
    """Return the n-grams of a stream's validation and test text, see `NgramSet`."""
    hasher = NgramHasher(size)
    return distinct([hasher(documents).hashes for name in HELD_OUT for documents in read_split(stream, name)])


def read_split(stream: Stream, name: str) -> Iterator[list[str]]:
    """Yield the documents of a split, some thousands at a time, as its tokens spell them."""
    tokenizer = StreamTokenizer.open(stream.root)
    yield from _read_file(TokenFile(stream.prefix(stream.split(name))), tokenizer)


def _read_file(file: TokenFile, tokenizer: StreamTokenizer) -> Iterator[list[str]]:
    ends = np.cumsum(file.sizes, dtype=np.int64)
    for first in range(0, len(file), _DOCUMENTS_AT_ONCE):
        last = min(first + _DOCUMENTS_AT_ONCE, len(file))
        begins = ends[first:last] - file.sizes[first:last]
        # without the eos that each ends with
        tokens = [file.ids[begin : end - 1] for begin, end in zip(begins, ends[first:last], strict=True)]
        yield tokenizer.decode_batch([(each.astype(np.int64) - NUM_FAIRSEQ_SYMBOLS).tolist() for each in tokens])


@dataclass(frozen=True)
class Overlap:
    """How much of a stream's test text stands in one of its mega-batches.

    Attributes:
        num_equal: test documents that stand there word by word.
        num_documents: test documents that share an n-gram with it.
        share: of the distinct n-grams of the test text, those that stand there, 0 to 1.
    """

    num_equal: int
    num_documents: int
    share: float


def measure_overlap(stream: Stream, size: int, names: Optional[Sequence[str]] = None) -> Iterator[tuple[str, Overlap]]:
    """Yield for each mega-batch how much of the test text it holds.

    Args:
        stream: of text.
        size: words of an n-gram.
        names: the splits to look at; None for all mega-batches.
    """
    hasher = NgramHasher(size)
    texts = [document for documents in read_split(stream, "test") for document in documents]
    ngrams = hasher(texts)
    known = distinct([ngrams.hashes])
    ngram_set, equal = NgramSet(known), dict.fromkeys(texts, 0)
    for name in names or [split.name for split in stream.splits[: stream.num_megabatches]]:
        found, met = np.zeros(len(known), bool), set()
        for documents in read_split(stream, name):
            found[ngram_set.find(hasher(documents).hashes)[1]] = True
            met |= equal.keys() & {*documents}
        hit = found[np.searchsorted(known, ngrams.hashes)]
        shared = len(np.unique(ngrams.documents[hit]))
        yield name, Overlap(sum(text in met for text in texts), shared, float(found.mean()) if len(found) else 0.0)


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers one to one (the finaliser of SplitMix64, Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
