"""Deal documents at random into mega-batches, a validation set, a test set and held-out parts.

The deal is a pure function of a document's hash: hash and seed give its key, all documents stand in the order of their
keys, and the sets are consecutive pieces of that order, cut where the bytes of UTF-8 reach a set's size. So the sets
have their sizes to within one document whatever the documents' lengths, and a few keys (`Cuts`) decide the set of a
document.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Callable, Optional, Sequence, Union

import numpy as np

from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError

Size = Union[int, float]
"""A number of bytes, or, below 1, a share of all there are."""
NUM_PREFIXES = 256
DROPPED = -1
LAST_KEY = 2**64 - 1
_TEST_SHARE, _LEAST_TEST, _MOST_TEST, _MOST_TEST_SHARE = 0.02, 12_000, 1_200_000, 0.2
_PAPER_VALID_SHARE = 0.1  # of a mega-batch


def keys_of(hashes: np.ndarray, seed: int, positions: Optional[np.ndarray] = None) -> np.ndarray:
    """Return the keys of documents, uint64; by their positions too where the same text may occur several times."""
    keys = scrambled(hashes ^ scrambled(np.array([seed], np.uint64)))
    return keys if positions is None else scrambled(keys + positions)


def prefix_bounds(keys: np.ndarray) -> np.ndarray:
    """Return where each of the `NUM_PREFIXES` parts of ascending keys begins, and the last one ends, int64."""
    firsts = np.arange(NUM_PREFIXES, dtype=np.uint64) << np.uint64(64 - NUM_PREFIXES.bit_length() + 1)
    return np.append(np.searchsorted(keys, firsts), len(keys)).astype("<i8")


@dataclass(frozen=True)
class Shares:
    """What to deal into.

    Attributes:
        by_argument: each argument of the command, or each group, is a mega-batch.
        held_out: whether a validation and a test set are drawn too.
        like_paper: whether these are as large as in the paper where no size is given.
        holdout: size of the part that is held out of each mega-batch; None: none is.
        sample: bytes of the tokenizer's sample of the first mega-batch.
    """

    num_megabatches: int
    by_argument: bool = False
    held_out: bool = True
    like_paper: bool = False
    valid: Optional[Size] = None
    test: Optional[Size] = None
    holdout: Optional[Size] = None
    sample: int = 0

    def held_out_bytes(self, total: int) -> tuple[int, int]:
        """Return the bytes of the validation and of the test set, out of ``total``."""
        if not self.held_out:
            return 0, 0
        valid, test = bytes_of(self.valid, total), bytes_of(self.test, total)
        if self.like_paper:
            rest = max(total - (valid or 0) - (test or 0), 0)
            megabatch = rest / (self.num_megabatches + (valid is None) * _PAPER_VALID_SHARE + (test is None))
            return round(megabatch * _PAPER_VALID_SHARE) if valid is None else valid, test or round(megabatch)
        usual = min(max(_TEST_SHARE * total, _LEAST_TEST), _MOST_TEST, _MOST_TEST_SHARE * total)
        test = round(usual) if test is None else test
        return round(min(test, usual) / 2) if valid is None else valid, test


def bytes_of(size: Optional[Size], total: int) -> Optional[int]:
    """Return a size in bytes, out of ``total``; None where none is given."""
    return size if size is None or isinstance(size, int) else max(1, round(size * total))


@dataclass(frozen=True)
class Cuts:
    """The keys at which the order of all documents is cut.

    The sets have the numbers of the mega-batches, then B for the validation set, B + 1 for the test set (where these
    are drawn), and the numbers after them for the held-out part of each mega-batch.

    Attributes:
        num_megabatches: B.
        by_argument: each argument is a mega-batch, except for what is up to the test set's last key.
        held_out: the last keys of the validation and the test set; none where they are not drawn.
        megabatches: the last key of each mega-batch but the last one; none where arguments are mega-batches.
        holdouts: the last key of each mega-batch's held-out part, if there are any.
        sample: the last key of the tokenizer's sample of mega-batch 0.
    """

    num_megabatches: int
    by_argument: bool
    held_out: Sequence[int] = ()
    megabatches: Sequence[int] = ()
    holdouts: Sequence[int] = ()
    sample: int = -1

    @property
    def num_drawn(self) -> int:
        """Number of mega-batches, with validation and test set."""
        return self.num_megabatches + len(self.held_out)

    @property
    def num_sets(self) -> int:
        """Number of all sets."""
        return self.num_drawn + len(self.holdouts)

    @property
    def spans(self) -> list[tuple[int, int, Optional[int]]]:
        """Per mega-batch the last key before it, its last key, and its argument where only that counts."""
        first = self.held_out[-1] if self.held_out else -1
        if self.by_argument:
            return [(first, LAST_KEY, number) for number in range(self.num_megabatches)]
        return [(*keys, None) for keys in pairwise([first, *self.megabatches, LAST_KEY])]

    def sets_of(self, keys: np.ndarray, arguments: np.ndarray) -> np.ndarray:
        """Return the set of each of some documents, int16."""
        lasts = np.array([*self.held_out, *self.megabatches], np.uint64)
        drawn = np.searchsorted(lasts, keys) - len(self.held_out)
        sets = np.where(drawn < 0, drawn + self.num_drawn, arguments if self.by_argument else drawn)
        if self.holdouts:
            is_megabatch = drawn >= 0
            last = np.array(self.holdouts, np.uint64)[np.where(is_megabatch, sets, 0)]
            sets = np.where(is_megabatch & (keys <= last), sets + self.num_drawn, sets)
        return sets.astype(np.int16)


class KeyOrder:
    """All documents in the order of their keys, of which one of `NUM_PREFIXES` parts is in memory at a time.

    Args:
        sizes: ``(NUM_PREFIXES, arguments)``, int64: bytes of the documents of each argument.
        load: returns the documents of a part in the order of the keys, with the fields key, bytes and argument.
    """

    def __init__(self, sizes: np.ndarray, load: Callable[[int], np.ndarray]) -> None:
        self.sizes, self._load = sizes, load
        self._loaded: tuple[object, tuple[np.ndarray, np.ndarray]] = None, (sizes, sizes)

    def key_at(self, target: float, argument: Optional[int] = None, including: Optional[bool] = None) -> int:
        """Return a last key with which the documents up to it have a number of bytes.

        With documents of 3, 3 and 4 bytes the targets 0, 5 and 7 are nearest to the ends of none, two and two of them.

        Args:
            target: the bytes.
            argument: count the documents of this argument alone; None: all.
            including: whether the document that reaches the target is included; None: if its end is nearer.
        """
        reached = np.cumsum(self._column(argument))
        prefix = int(np.searchsorted(reached, target))
        if prefix == len(reached):
            return LAST_KEY
        keys, ends = self._part(prefix, argument)
        before = int(reached[prefix - 1]) if prefix else 0
        number = int(np.searchsorted(ends + before, target))  # of the document that reaches it
        end, begin = int(ends[number]) + before, before + (int(ends[number - 1]) if number else 0)
        if including is None:
            including = not target - begin < end - target
        return int(keys[number]) - (not including)

    def reached(self, key: int, argument: Optional[int] = None) -> int:
        """Return the bytes of the documents up to a key and with it."""
        sizes = self._column(argument)
        if key in (-1, LAST_KEY):
            return int(sizes.sum()) if key > 0 else 0
        prefix = key * NUM_PREFIXES // (LAST_KEY + 1)
        keys, ends = self._part(prefix, argument)
        number = int(np.searchsorted(keys, np.uint64(key), side="right"))
        return int(sizes[:prefix].sum()) + (int(ends[number - 1]) if number else 0)

    def _column(self, argument: Optional[int]) -> np.ndarray:
        return self.sizes.sum(axis=1) if argument is None else self.sizes[:, argument]

    def _part(self, prefix: int, argument: Optional[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a part's documents, and their bytes up to each."""
        if self._loaded[0] != (prefix, argument):
            records = self._load(prefix)
            if argument is not None:
                records = records[records["argument"] == argument]
            keys = np.ascontiguousarray(records["key"])
            self._loaded = (prefix, argument), (keys, np.cumsum(records["bytes"], dtype=np.int64))
        return self._loaded[1]


def cut(order: KeyOrder, shares: Shares) -> Cuts:
    """Cut the documents into sets. Raises AlmaError if a size that is asked for is more than there is."""
    total = int(order.sizes.sum())
    valid, test = shares.held_out_bytes(total)
    if valid + test >= total:
        given = {"--valid-bytes": (shares.valid, valid), "--test-bytes": (shares.test, test)}
        asked = {flag: f"{wanted:,}" for flag, (size, wanted) in given.items() if size is not None}
        raise AlmaError(
            f"{', '.join(asked)}: {' and '.join(asked.values())} bytes asked for, but there are only {total:,}; give "
            "fewer, or more text"
        )
    cuts = Cuts(shares.num_megabatches, shares.by_argument)
    first = 0
    if shares.held_out:
        last_valid = order.key_at(valid, including=True)
        last_test = order.key_at(order.reached(last_valid) + test, including=True)
        cuts, first = replace(cuts, held_out=[last_valid, last_test]), order.reached(last_test)
    if not shares.by_argument:
        size = (total - first) / shares.num_megabatches
        ends = [order.key_at(first + size * number) for number in range(1, shares.num_megabatches)]
        cuts = replace(cuts, megabatches=ends)
    if shares.holdout is not None:
        holdouts = [_holdout(order, shares.holdout, *each) for each in enumerate(cuts.spans)]
        cuts = replace(cuts, holdouts=holdouts)
    before, end, argument = cuts.spans[0]
    begin = order.reached(cuts.holdouts[0] if cuts.holdouts else before, argument)
    sample = max(
        order.key_at(begin + 1, argument, including=True),
        order.key_at(begin + shares.sample + 1, argument, including=False),
    )
    return replace(cuts, sample=min(sample, end))


def _holdout(order: KeyOrder, size: Size, number: int, span: tuple[int, int, Optional[int]]) -> int:
    """Return the last key of the first documents of a mega-batch, which are held out of it."""
    before, end, argument = span
    begin = order.reached(before, argument)
    total = order.reached(end, argument) - begin
    wanted = bytes_of(size, total)
    assert wanted is not None
    last = order.key_at(begin + wanted, argument, including=True) if total else end
    if 2 * wanted > total or order.reached(last, argument) - begin >= total:
        raise AlmaError(
            f"--holdout-bytes {wanted}: mega-batch {number} has {total:,} bytes, of which at most half and not all "
            "documents can be held out; give fewer, or more text"
        )
    return last
