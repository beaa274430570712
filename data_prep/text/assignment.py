"""Hash documents and n-grams of words, and assign documents at random to mega-batches and held-out splits.

Equal document hashes identify duplicates. Shared n-gram hashes identify training documents that repeat held-out text
(`HeldOutNgrams`). Brown et al. (2020, appendix C; n = 13) ignore common n-grams too, but remove text for one rare
n-gram. Hashes depend only on letters and digits (any script, Unicode NFKC, case folded). So differences in case,
punctuation, white space, invisible characters or accent encoding do not hide a repetition. In scripts without spaces,
each character is a word. A document with fewer than n words is one n-gram.

The seed and the hash of a document (with ``--keep-duplicates``, also its position) determine its sort key. `assign`
cuts the documents, sorted by key, into sets. The size of a set in UTF-8 bytes differs from the requested size by less
than one document. ``--one-per-input`` and ``--by`` make one mega-batch from the documents of each INPUT or group.
"""

import functools
import hashlib
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import Optional, Sequence, Union

import numpy as np

from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError

DEFAULT_NGRAM = 13
_LETTER, _IGNORED = 1, 2  # kinds of characters; 0 is a word separator
_ASCII = bytes(byte if chr(byte).isalnum() and byte < 128 else 0 for byte in range(256))
_ASSIGNED = 0x32400  # Unicode has only tags and variation selectors from this code point on.
# Scripts without spaces: Thai and Lao, Myanmar, Khmer, kana, ideographs. First code point, first code point after, ...
_UNSPACED = np.array(
    [0xE00, 0xF00, 0x1000, 0x10A0, 0x1780, 0x1800, 0x3000, 0x3130, 0x31A0, 0xA4D0, 0x20000, 0x32400], np.uint32
)
# Factor for each position of a letter in its word.
_WEIGHTS = np.multiply.accumulate(np.full(1 << 12, 0x9FB21C651E98DF25, np.uint64))
_LETTERS_AT_ONCE = 1 << 21
_DOCUMENTS_AT_ONCE = 256
COMMON_IN_HELD_OUT = 3  # held-out documents
COMMON_IN_TRAINING = 11  # training documents; Brown et al. (2020) ignore n-grams in more than ten
_COPIED = 0.05  # share of n-grams
_MOSTLY_COPIED = 0.75  # share of n-grams, including those in many training documents
_LONG = 5  # times the size of a held-out part
Size = Union[int, float]  # number of bytes (int), or share of a total (float below 1)
_PAPER_VALID_SHARE = 0.1  # share of a mega-batch


@functools.cache
def _kinds() -> np.ndarray:
    kinds = np.zeros(0x110000, np.uint8)  # of each code point: 0 (word separator), ``_LETTER`` or ``_IGNORED``
    categories = [unicodedata.category(chr(code)) for code in range(_ASSIGNED)]
    kinds[:_ASSIGNED] = [_LETTER * (each[0] in "LNM") + _IGNORED * (each == "Cf") for each in categories]
    kinds[[0x034F, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE1000)]] = _IGNORED
    return kinds


def letters_of(documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (array of code points, in which 0 separates words and documents; end index of each document)."""
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
    """Return a uint64 hash of the letters and digits of each document, or of all characters if it has neither."""
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
    """N-grams of a list of documents, with the position of each n-gram."""

    hashes: np.ndarray  # ``(n-grams,)``, uint64
    documents: np.ndarray  # ``(n-grams,)``: index of the document of each n-gram, ascending
    starts: np.ndarray  # ``(n-grams,)``: index of the first word of each n-gram in its document


def ngrams_of(documents: Sequence[str], size: int) -> Ngrams:
    """Hash all sequences of ``size`` words in documents. A document of 1 to ``size`` - 1 words has one n-gram.

    The hashes do not depend on the machine.
    """
    letters, ends = letters_of(documents)
    codes, word_starts = _code_words(letters)
    lengths = np.diff(np.searchsorted(word_starts, ends), prepend=0)
    # Pad a document with fewer words than n with the code 0.
    padded = np.where((lengths > 0) & (lengths < size), size, lengths)
    owners = np.repeat(np.arange(len(documents)), padded)
    starts = np.arange(len(owners)) - (np.cumsum(padded) - padded)[owners]
    filled = np.zeros(len(owners), np.uint64)
    filled[starts < lengths[owners]] = codes
    hashes = np.zeros(max(len(owners) - size + 1, 0), np.uint64)
    for offset in range(size):
        hashes *= np.uint64(0xD6E8FEB86659FD93)  # odd, so that multiplication is invertible
        hashes += filled[offset : offset + len(hashes)]
    within = np.flatnonzero(starts[: len(hashes)] <= (padded - size)[owners[: len(hashes)]])
    return Ngrams(scrambled(hashes[within]), owners[within], starts[within])


def ngram_at(document: str, start: int, size: int) -> str:
    """Return the n-gram of ``size`` words at word index ``start`` of a document, as words joined by spaces."""
    letters, _ = letters_of([document])
    bounds = [*_code_words(letters)[1][start : start + size + 1].tolist(), len(letters)][: size + 1]
    return " ".join("".join(map(chr, letters[slice(*word)].tolist())).strip("\0") for word in pairwise(bounds))


def _code_words(letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash of each word, index of the first letter of each word) for code points returned by `letters_of`."""
    codes, starts, start = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    while start < len(letters):
        gaps = np.flatnonzero(letters[start + _LETTERS_AT_ONCE :][:_LETTERS_AT_ONCE] == 0)
        end = start + _LETTERS_AT_ONCE + int(gaps[0]) if len(gaps) else len(letters)  # position of a separator
        piece = letters[start:end]
        places = np.flatnonzero(piece)
        own = piece[places]
        is_first = np.diff(places, prepend=-2) > 1
        if own.max(initial=0) >= _UNSPACED[0]:
            is_alone = np.searchsorted(_UNSPACED, own, side="right") % 2 == 1
            is_first[1:] |= is_alone[1:] | is_alone[:-1]
        first = np.flatnonzero(is_first)  # position of each word among the letters
        if len(first):
            in_word = np.arange(len(places)) - np.repeat(first, np.diff(first, append=len(places)))
            weighed = _WEIGHTS[in_word & (len(_WEIGHTS) - 1)] * own
            codes.append(scrambled(np.add.reduceat(weighed, first)))
            starts.append(places[first] + start)
        start = end
    return np.concatenate(codes), np.concatenate(starts)


class HeldOutNgrams:
    """N-grams of held-out documents, to find training documents that repeat held-out text.

    N-grams in `COMMON_IN_HELD_OUT` held-out documents, such as licences, are common; others: see `find_copies`.

    Args:
        hashes: ``(n-grams,)`` distinct hashes, ascending.
        owners: ``(n-grams,)`` index of the shortest held-out document with each n-gram, or -1 for a common n-gram.
        sizes: ``(held-out documents,)`` number of distinct n-grams of each held-out document.
    """

    def __init__(self, hashes: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> None:
        self.hashes, self.owners, self.sizes = hashes, owners, sizes
        bits = min(max(len(hashes), 1).bit_length() + 3, 27)
        self._shift = np.uint64(64 - bits)
        # A table of the leading bits excludes most hashes outside the set, at a tenth of the cost of a binary search.
        self._table = np.zeros(1 << bits, bool)
        self._table[hashes >> self._shift] = True

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> "HeldOutNgrams":
        """Merge the n-grams of held-out documents; ``documents``: distinct hashes of each document."""
        documents = sorted(documents, key=len)
        sizes = np.array([*map(len, documents)], np.int64)
        hashes, first, counts = np.unique(
            np.concatenate([np.empty(0, np.uint64), *documents]), return_index=True, return_counts=True
        )
        owners = np.repeat(np.arange(len(sizes)), sizes)[first]
        return cls(hashes, np.where(counts < COMMON_IN_HELD_OUT, owners, -1), sizes)

    def find_shared(self, ngrams: Ngrams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find n-grams of held-out documents in documents.

        Returns:
            (index of the document, index in ``hashes``, index of the first such n-gram in ``ngrams``) of each distinct
            pair of a document and an n-gram, ordered by document.
        """
        candidates = np.flatnonzero(self._table[ngrams.hashes >> self._shift])
        places = np.searchsorted(self.hashes, ngrams.hashes[candidates]).clip(max=max(0, len(self.hashes) - 1))
        is_shared = self.hashes[places] == ngrams.hashes[candidates]
        shared, places = candidates[is_shared], places[is_shared]
        # One integer for each pair of indices is faster than np.unique along an axis.
        pairs, first = np.unique(ngrams.documents[shared] * len(self.hashes) + places, return_index=True)
        return *np.divmod(pairs, max(1, len(self.hashes))), shared[first]

    def find_copies(self, ngrams: Ngrams, rare: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find documents that repeat held-out text.

        The share of distinct rare n-grams in common is `_COPIED` or more, of the document or of a held-out document, or
        the share of all n-grams in common is `_MOSTLY_COPIED` or more of the document (a revision of held-out text).

        Args:
            ngrams: n-grams of the documents.
            rare: ``(n-grams,)`` whether each held-out n-gram is in few training documents.

        Returns:
            (indices of the documents, index of the first word of a shared n-gram of each: the first rare one, if any).
        """
        documents, places, first = self.find_shared(ngrams)
        is_rare = rare[places] & (self.owners[places] >= 0)
        owning, begins, num_shared = np.unique(documents, return_index=True, return_counts=True)
        num_rare = np.add.reduceat(is_rare, begins, dtype=np.int64)
        bounds = np.searchsorted(ngrams.documents, [owning, owning + 1]).T
        sizes = np.array([len(np.unique(ngrams.hashes[begin:end])) for begin, end in bounds])
        # One integer for each pair of a document and a held-out document.
        pairs = documents[is_rare] * len(self.sizes) + self.owners[places[is_rare]]
        pairs, num_of_pairs = np.unique(pairs, return_counts=True)
        containing, owners = np.divmod(pairs, max(1, len(self.sizes)))
        is_copy = (num_rare >= _COPIED * sizes) | (num_shared >= _MOSTLY_COPIED * sizes)
        is_copy |= np.isin(owning, containing[num_of_pairs >= _COPIED * self.sizes[owners]])
        shown = first[np.lexsort((first, ~is_rare, documents))[begins]]
        return owning[is_copy], ngrams.starts[shown[is_copy]]


def distinct_of_each(ngrams: Ngrams, num_documents: int) -> list[np.ndarray]:
    """Return the distinct n-gram hashes of each document, ascending."""
    bounds = np.searchsorted(ngrams.documents, np.arange(1, num_documents))
    return [np.unique(hashes) for hashes in np.split(ngrams.hashes, bounds)] if num_documents else []


def held_out_ngrams(stream: Stream, size: int) -> list[np.ndarray]:
    """Return the distinct n-gram hashes of each document of all non-training splits (validation, test, holdout)."""
    tokenizer, found = StreamTokenizer.open(stream.root), list[np.ndarray]()
    for name in (split.name for split in stream.splits if not split.name.endswith("/train")):
        file = TokenFile(stream.root / name)
        bounds = np.pad(np.cumsum(file.sizes, dtype=np.int64), (1, 0))
        for first in range(0, len(file.sizes), _DOCUMENTS_AT_ONCE):
            spans = pairwise(bounds[first : first + _DOCUMENTS_AT_ONCE + 1].tolist())
            # without EOS
            ids = [file.ids[start : end - 1].astype(np.int64) for start, end in spans]
            texts = tokenizer.decode_batch([(each - NUM_FAIRSEQ_SYMBOLS).tolist() for each in ids])
            found += distinct_of_each(ngrams_of(texts, size), len(texts))
    return found


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers with a bijection (finaliser of SplitMix64, Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def keys_of(hashes: np.ndarray, seed: int, positions: Optional[np.ndarray] = None) -> np.ndarray:
    """Return a pseudo-random uint64 sort key for each document. Without ``positions``, equal hashes give equal keys."""
    keys = scrambled(hashes ^ scrambled(np.array([seed], np.uint64)))
    return keys if positions is None else scrambled(keys + positions)


class TooLittleTextError(AlmaError):
    """The new text has too few documents for the mega-batches and held-out sets, or the stream already has them all."""


@dataclass(frozen=True)
class Shares:
    """Number of mega-batches, and requested sizes of the held-out sets."""

    num_megabatches: int
    by_argument: bool = False  # whether each INPUT or each group of ``--by`` is a mega-batch
    like_paper: bool = False  # whether the default sizes are the sizes of the paper
    valid: Optional[Size] = None  # size of the validation set; None for the default size
    test: Optional[Size] = None  # size of the test set; None for the default size
    holdout: Optional[Size] = None  # size of the held-out part of each mega-batch; None for no held-out part
    sample: int = 0  # maximum number of bytes of mega-batch 0 for training the tokenizer
    first: int = 0  # number of the first new mega-batch; a new stream (0) gets a validation set and a test set

    @property
    def num_sets(self) -> int:
        return self.num_megabatches * (1 if self.holdout is None else 2) + (2 if self.first == 0 else 0)

    def held_out_bytes(self, total: int) -> tuple[int, int]:
        """Return (bytes of the validation set, bytes of the test set) for a text of ``total`` bytes."""
        if self.first > 0:
            return 0, 0
        valid, test = bytes_of(self.valid, total), bytes_of(self.test, total)
        if self.like_paper:
            rest = max(total - (valid or 0) - (test or 0), 0)
            megabatch = rest / (self.num_megabatches + (valid is None) * _PAPER_VALID_SHARE + (test is None))
            return round(megabatch * _PAPER_VALID_SHARE) if valid is None else valid, test or round(megabatch)
        usual = min(max(0.02 * total, 12_000), 1_200_000, 0.2 * total)  # default size of the test set
        test = round(usual) if test is None else test
        return round(min(test, usual) / 2) if valid is None else valid, test


def bytes_of(size: Optional[Size], total: int) -> Optional[int]:
    """Convert a size to bytes. A float is a share of ``total`` bytes. Return None if ``size`` is None."""
    return size if size is None or isinstance(size, int) else max(1, round(size * total))


def assign(sizes: np.ndarray, arguments: np.ndarray, shares: Shares) -> np.ndarray:
    """Return the int16 set number of each document.

    Sets 0 to B-1 are the mega-batches. The validation set, the test set and the held-out set of each mega-batch follow,
    if requested. Documents of mega-batch 0 that train the tokenizer get the number ``shares.num_sets`` instead of 0.

    Args:
        sizes: ``(documents,)``, not empty: number of bytes of each document, in the order of the sort keys.
        arguments: ``(documents,)``: index of the INPUT (with ``--by``, of the group) of each document.
        shares: number of mega-batches, and sizes of the held-out sets.

    Raises:
        TooLittleTextError: held-out sets leave no training text, or long documents make them much too large.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total, num_megabatches, first = int(ends[-1]), shares.num_megabatches, 0
    valid, test = shares.held_out_bytes(total)
    if valid + test >= total:
        raise TooLittleTextError(
            f"--valid-bytes, --test-bytes: expected a sum below the {total:,} bytes of the text, found {valid:,} + "
            f"{test:,}; give smaller sizes, or more text"
        )
    sets = np.empty(len(sizes), np.int16)
    if shares.first == 0:
        num_valid = _count(ends, valid)
        first = _count(ends, int(ends[num_valid - 1]) + test)
        sets[:num_valid], sets[num_valid:first] = num_megabatches, num_megabatches + 1
        if first < len(sizes) and 2 * (ends[first - 1] - valid - test) > total:
            raise TooLittleTextError(
                f"valid, test: expected about {valid + test:,} of {total:,} bytes, found {ends[first - 1]:,}, because "
                "documents are long; separate documents by an empty line, or give --format lines, or more documents"
            )
    if shares.by_argument:
        order = first + np.argsort(arguments[first:], kind="stable")
        bounds = np.searchsorted(arguments[order], np.arange(1, num_megabatches))
    else:
        order, begin = np.arange(first, len(sizes)), int(ends[first - 1]) if first else 0
        targets = begin + (total - begin) / num_megabatches * np.arange(1, num_megabatches)
        # Include the document that crosses the target if its end is nearer to the target than its start.
        last = np.searchsorted(ends, targets)
        bounds = last + (targets - (ends[last] - sizes[last]) >= ends[last] - targets) - first
    del ends  # Assigning may need at most 64 bytes of memory for each document.
    for number, own in enumerate(np.split(order, bounds)):
        sets[own] = number
        if shares.holdout is not None:
            own_total = int(sizes[own].sum(dtype=np.int64))
            size = bytes_of(shares.holdout, own_total) or 0
            # Prefer documents that do not make the held-out part much larger than requested.
            own = own[np.argsort(sizes[own] > _LONG * size, kind="stable")]
            own_ends = np.cumsum(sizes[own], dtype=np.int64)
            num_held_out = _count(own_ends, size)
            if len(own) > 1 and 2 * own_ends[num_held_out - 1] > own_total:
                num_held_out -= 1
                if not num_held_out:  # hold out only the shortest document
                    own, num_held_out = own[np.argsort(sizes[own], kind="stable")], 1
            if len(own) > 1 and 2 * size > own_total + 1:  # a share of 50 % may be rounded up
                raise TooLittleTextError(
                    f"--holdout-bytes {size}: expected at most half of the {own_total:,} bytes of mega-batch "
                    f"{shares.first + number} (without duplicates), so that documents remain for training; give a "
                    "smaller size, or more text"
                )
            sets[own[:num_held_out]] = shares.num_sets - num_megabatches + number
            own = own[num_held_out:]
        if number == 0:
            own_ends = np.cumsum(sizes[own], dtype=np.int64)
            sets[own[: max(1, np.searchsorted(own_ends, shares.sample, side="right"))]] = shares.num_sets
    return sets


def _count(ends: np.ndarray, num_bytes: int) -> int:
    # smallest n >= 1 such that the first n documents reach ``num_bytes`` bytes; at most ``len(ends)``
    return min(int(np.searchsorted(ends, num_bytes)) + 1, len(ends))
