"""Hash documents and n-grams of words, to find duplicate documents and training text that repeats held-out text.

Hashes depend only on the letters and digits of a text (any script, Unicode NFKC, case folded), so that differences in
case, punctuation, white space, invisible characters or accent encoding do not hide a repetition. A text with fewer than
n words is one n-gram. Method: Brown et al. 2020, appendix C (n = 13).
"""

import functools
import hashlib
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import Sequence

import numpy as np

from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile

DEFAULT_NGRAM = 13
_LETTER, _IGNORED = 1, 2  # kinds of characters; 0 is a word separator
_ASCII = bytes(byte if chr(byte).isalnum() and byte < 128 else 0 for byte in range(256))
_ASSIGNED = 0x32400  # Unicode has only tags and variation selectors from this code point on.
_FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd, so that multiplication is invertible
# Factor for each position of a letter in its word.
_WEIGHTS = np.multiply.accumulate(np.full(1 << 12, 0x9FB21C651E98DF25, np.uint64))
_LETTERS_AT_ONCE = 1 << 21
_DOCUMENTS_AT_ONCE = 256
_MAX_TABLE_BITS = 27


@functools.cache
def _kinds() -> np.ndarray:
    """Return the kind of each code point, uint8: 0 (word separator), ``_LETTER`` or ``_IGNORED``."""
    kinds = np.zeros(0x110000, np.uint8)
    categories = [unicodedata.category(chr(code)) for code in range(_ASSIGNED)]
    kinds[:_ASSIGNED] = [_LETTER * (each[0] in "LNM") + _IGNORED * (each == "Cf") for each in categories]
    kinds[[0x034F, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE1000)]] = _IGNORED
    return kinds


def letters_of(documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (code points of letters and digits, with 0 for separators and document ends; end of each document)."""
    texts = [text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold() for text in documents]
    ends = np.cumsum(np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts)))
    joined = "".join(f"{text}\0" for text in texts)
    if joined.isascii():
        return np.frombuffer(joined.encode().translate(_ASCII), np.uint8), ends
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _kinds()[codes]
    codes = np.where(kinds == _LETTER, codes, np.uint32(0))
    ignored = np.flatnonzero(kinds == _IGNORED)
    return np.delete(codes, ignored), ends - np.searchsorted(ignored, ends)


def document_hashes(documents: Sequence[str]) -> np.ndarray:
    """Return a hash (uint64) of each document: of the letters and digits if there are any, else of all characters."""
    if not documents:
        return np.empty(0, np.uint64)
    codes, ends = letters_of(documents)
    places = np.flatnonzero(codes)
    letters = memoryview(codes[places].astype("<u4").tobytes())
    bounds = pairwise([0, *(np.searchsorted(places, ends) * 4).tolist()])
    digests = [
        hashlib.blake2b(letters[start:end] if end > start else document.encode(), digest_size=8).digest()
        for document, (start, end) in zip(documents, bounds, strict=True)
    ]
    return np.frombuffer(b"".join(digests), "<u8")


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of a list of documents."""

    hashes: np.ndarray  # ``(n-grams,)``, uint64
    documents: np.ndarray  # ``(n-grams,)``: index of the document of each n-gram, ascending
    starts: np.ndarray  # ``(n-grams,)``: index of the first word of each n-gram in its document


@dataclass(frozen=True)
class NgramHasher:
    """Hash function for n-grams of ``size`` words, the same on every machine."""

    size: int

    def __call__(self, documents: Sequence[str]) -> Ngrams:
        """Return the n-grams of documents; a document without words has no n-gram."""
        letters, ends = letters_of(documents)
        codes, word_starts = _code_words(letters)
        lengths = np.diff(np.searchsorted(word_starts, ends), prepend=0)
        # Pad a document with fewer words than n with the code 0.
        padded = np.where((lengths > 0) & (lengths < self.size), self.size, lengths)
        owners = np.repeat(np.arange(len(documents)), padded)
        starts = np.arange(len(owners)) - (np.cumsum(padded) - padded)[owners]
        filled = np.zeros(len(owners), np.uint64)
        filled[starts < lengths[owners]] = codes
        hashes = np.zeros(max(len(owners) - self.size + 1, 0), np.uint64)
        for offset in range(self.size):
            hashes *= _FACTOR
            hashes += filled[offset : offset + len(hashes)]
        within = np.flatnonzero(starts[: len(hashes)] <= (padded - self.size)[owners[: len(hashes)]])
        return Ngrams(scrambled(hashes[within]), owners[within], starts[within])

    def words(self, document: str, start: int) -> str:
        """Return the n-gram that begins with word ``start`` (from 0) of a document, as words joined by spaces."""
        codes, _ = letters_of([document])
        text = "".join(map(chr, codes.tolist())).replace("\0", " ")
        return " ".join(text.split()[start : start + self.size])


def _code_words(letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes of words, positions of the first letters of words) for code points returned by `letters_of`."""
    codes, starts, start = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    while start < len(letters):
        gaps = np.flatnonzero(letters[start + _LETTERS_AT_ONCE :][:_LETTERS_AT_ONCE] == 0)
        end = start + _LETTERS_AT_ONCE + int(gaps[0]) if len(gaps) else len(letters)  # position of a separator
        piece = letters[start:end]
        places = np.flatnonzero(piece)
        first = np.flatnonzero(np.diff(places, prepend=-2) > 1)  # position of each word among the letters
        if len(first):
            in_word = np.arange(len(places)) - np.repeat(first, np.diff(first, append=len(places)))
            weighed = _WEIGHTS[in_word & (len(_WEIGHTS) - 1)] * piece[places]
            codes.append(scrambled(np.add.reduceat(weighed, first)))
            starts.append(places[first] + start)
        start = end
    return np.concatenate(codes), np.concatenate(starts)


class NgramSet:
    """A set of n-gram hashes; ``hashes`` are ascending and distinct (see `distinct`)."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes = hashes
        bits = min(max(len(hashes), 1).bit_length() + 3, _MAX_TABLE_BITS)
        self._shift = np.uint64(64 - bits)
        # A table of the leading bits excludes most hashes outside the set, at a tenth of the cost of a binary search.
        self._table = np.zeros(1 << bits, bool)
        self._table[hashes >> self._shift] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the ascending positions in ``hashes`` of the elements that are in the set."""
        candidates = np.flatnonzero(self._table[hashes >> self._shift])
        if not len(candidates):
            return candidates
        places = np.searchsorted(self._hashes, hashes[candidates]).clip(max=len(self._hashes) - 1)
        return candidates[self._hashes[places] == hashes[candidates]]


def distinct(hashes: Sequence[np.ndarray]) -> np.ndarray:
    """Return the distinct hashes of several arrays in ascending order."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))


def held_out_ngrams(stream: Stream, size: int) -> np.ndarray:
    """Return the distinct n-gram hashes of the validation, test and held-out text of a stream."""
    hasher, tokenizer, found = NgramHasher(size), StreamTokenizer.open(stream.root), []
    for split in stream.splits:
        if split.name.endswith("/train"):
            continue
        file = TokenFile(stream.root / split.name)
        ends = np.cumsum(file.sizes, dtype=np.int64)
        for first in range(0, len(file.sizes), _DOCUMENTS_AT_ONCE):
            some = slice(first, first + _DOCUMENTS_AT_ONCE)
            spans = zip((ends[some] - file.sizes[some]).tolist(), ends[some].tolist(), strict=True)
            ids = [file.ids[begin : end - 1].astype(np.int64) for begin, end in spans]  # without EOS
            texts = tokenizer.decode_batch([(each - NUM_FAIRSEQ_SYMBOLS).tolist() for each in ids])
            found.append(hasher(texts).hashes)
    return distinct(found)


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers with a bijection (finaliser of SplitMix64, Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
