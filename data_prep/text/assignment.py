"""Assign documents at random to mega-batches, a validation set, a test set, and held-out parts of the mega-batches.

The seed and the hash of a document determine the sort key of the document. `assign` sorts the documents by key and cuts
the list into sets. The size of a set in UTF-8 bytes differs from the requested size by less than one document. With
``--one-per-input``, the INPUT of a document determines the mega-batch; with ``--by``, the group of the document.
"""

from dataclasses import dataclass
from typing import Optional, Union

import numpy as np

from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError

Size = Union[int, float]
"""Number of bytes (int), or share of a total (float below 1)."""
_TEST_SHARE, _LEAST_TEST, _MOST_TEST, _MOST_TEST_SHARE = 0.02, 12_000, 1_200_000, 0.2
_PAPER_VALID_SHARE = 0.1  # share of a mega-batch


def keys_of(hashes: np.ndarray, seed: int, positions: Optional[np.ndarray] = None) -> np.ndarray:
    """Return the uint64 sort key of each document. Different ``positions`` give equal hashes different keys."""
    keys = scrambled(hashes ^ scrambled(np.array([seed], np.uint64)))
    return keys if positions is None else scrambled(keys + positions)


@dataclass(frozen=True)
class Shares:
    """Number of mega-batches, and requested sizes of the held-out sets."""

    num_megabatches: int
    by_argument: bool = False  # whether each INPUT or each group of ``--by`` is a mega-batch
    held_out: bool = True  # whether the stream gets a validation set and a test set
    like_paper: bool = False  # whether the default sizes are the sizes of the paper
    valid: Optional[Size] = None
    test: Optional[Size] = None
    holdout: Optional[Size] = None  # size of the held-out part of each mega-batch, or None
    sample: int = 0  # number of bytes of mega-batch 0 for training the tokenizer

    @property
    def num_sets(self) -> int:
        return self.num_megabatches * (1 if self.holdout is None else 2) + (2 if self.held_out else 0)

    def held_out_bytes(self, total: int) -> tuple[int, int]:
        """Return (bytes of the validation set, bytes of the test set) for a text of ``total`` bytes."""
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
    """Convert a size to bytes. A float is a share of ``total`` bytes. Return None if ``size`` is None."""
    return size if size is None or isinstance(size, int) else max(1, round(size * total))


def assign(sizes: np.ndarray, arguments: np.ndarray, shares: Shares) -> np.ndarray:
    """Return the int16 set number of each document.

    Sets 0 to B-1 are the mega-batches. The validation set, the test set and the held-out parts of the mega-batches
    follow, if requested. Set number ``num_sets`` marks the documents of mega-batch 0 that train the tokenizer.

    Args:
        sizes: ``(documents,)``, not empty: number of bytes of each document, in the order of the sort keys.
        arguments: ``(documents,)``: index of the INPUT (with ``--by``, of the group) of each document.
        shares: number and sizes of the sets.

    Raises:
        AlmaError: the validation and test sets leave no text for training, or a held-out part is too large.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total, num_megabatches, first = int(ends[-1]), shares.num_megabatches, 0
    valid, test = shares.held_out_bytes(total)
    if valid + test >= total:
        sizes_of = {"--valid-bytes": (shares.valid, valid), "--test-bytes": (shares.test, test)}
        requested = {flag: f"{size:,}" for flag, (given, size) in sizes_of.items() if given is not None}
        raise AlmaError(
            f"{', '.join(requested)}: expected a sum below the {total:,} bytes of the text, found "
            f"{' + '.join(requested.values())}; give smaller sizes, or more text"
        )
    sets = np.empty(len(sizes), np.int16)
    if shares.held_out:
        num_valid = _count(ends, valid)
        first = _count(ends, int(ends[num_valid - 1]) + test)
        sets[:num_valid], sets[num_valid:first] = num_megabatches, num_megabatches + 1
    if shares.by_argument:
        order = first + np.argsort(arguments[first:], kind="stable")
        bounds = np.searchsorted(arguments[order], np.arange(1, num_megabatches))
    else:
        order, begin = np.arange(first, len(sizes)), int(ends[first - 1]) if first else 0
        targets = begin + (total - begin) / num_megabatches * np.arange(1, num_megabatches)
        # Include the document that crosses the target if the end of the document is nearer than the start.
        last = np.searchsorted(ends, targets)
        bounds = last + (targets - (ends[last] - sizes[last]) >= ends[last] - targets) - first
    del ends  # Assigning may need at most 64 bytes of memory for each document.
    for number, own in enumerate(np.split(order, bounds)):
        sets[own] = number
        if shares.holdout is not None:
            own_ends = np.cumsum(sizes[own], dtype=np.int64)
            own_total = int(own_ends[-1]) if len(own) else 0
            size = bytes_of(shares.holdout, own_total) or 0
            num_held_out = _count(own_ends, size)
            if 2 * size > own_total or num_held_out == len(own):
                raise AlmaError(
                    f"--holdout-bytes {size}: expected at most half of the {own_total:,} bytes of mega-batch {number}, "
                    "and fewer than all documents; give a smaller size, or more text"
                )
            sets[own[:num_held_out]] = shares.num_sets - num_megabatches + number
            own = own[num_held_out:]
        if number == 0:
            own_ends = np.cumsum(sizes[own], dtype=np.int64)
            sets[own[: max(1, np.searchsorted(own_ends, shares.sample, side="right"))]] = shares.num_sets
    return sets


def _count(ends: np.ndarray, num_bytes: int) -> int:
    """Return the smallest n such that the first n documents have a total of at least ``num_bytes`` bytes, or all."""
    return min(int(np.searchsorted(ends, num_bytes)) + 1, len(ends))
