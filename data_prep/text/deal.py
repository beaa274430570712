"""Deal documents at random into mega-batches of equal word counts, a validation set and a test set.

The documents are put into a random order once; the sets are consecutive pieces of that order, cut where the words
reach a set's share. So each set differs from its share by less than one document, whatever the documents' lengths.
The order comes from the documents' content and the seed: no generator whose numbers a new version might change. What
sets a document is in follows from its key and the few keys at which the order is cut (`Cuts`).
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Generator, Optional, Sequence

import numpy as np

from data_prep.text.buckets import LAST_KEY, KeyOrder, key_order_of, survey_of
from data_prep.text.options import Words, words_of
from data_prep.text.passes import SingleStep, Work
from data_prep.text.pool import Progress
from fairseq_alma.errors import AlmaError

DROPPED = -1
_VALID_SHARE = 0.1  # of a mega-batch
_DEALT = "dealt.json"


@dataclass(frozen=True)
class Shares:
    """What to deal into.

    Attributes:
        num_megabatches: B.
        by_argument: each argument of the command, or each group, is a mega-batch, instead of equal pieces.
        held_out: whether a validation and a test set are drawn too.
        valid_bytes: words of the validation set; None for a tenth of a mega-batch. Shares of all are below 1.
        test_bytes: words of the test set; None for as many as a mega-batch has.
        like_paper: whether the held-out sets have the paper's sizes where none are given.
        holdout_bytes: words of each mega-batch that are held out of it; None: none.
    """

    num_megabatches: int
    by_argument: bool = False
    held_out: bool = True
    like_paper: bool = False
    valid_bytes: Optional[Words] = None
    test_bytes: Optional[Words] = None
    holdout_bytes: Optional[Words] = None

    @property
    def num_drawn(self) -> int:
        """Number of mega-batches, with validation and test set."""
        return self.num_megabatches + 2 * self.held_out

    def held_out_words(self, total: int) -> tuple[float, float]:
        """Return the words of the validation and of the test set, out of ``total``."""
        if not self.held_out:
            return 0.0, 0.0
        if not self.like_paper:
            test = self.test_bytes or min(max(0.02 * total, 12_000), 1_200_000, 0.2 * total)
            return self.valid_bytes or test / 2, test
        rest = max(total - (self.valid_bytes or 0) - (self.test_bytes or 0), 0)
        pieces = self.num_megabatches + (self.valid_bytes is None) * _VALID_SHARE + (self.test_bytes is None)
        valid = rest / pieces * _VALID_SHARE if self.valid_bytes is None else self.valid_bytes
        test = rest / pieces if self.test_bytes is None else self.test_bytes
        return valid, test


Span = tuple[int, int, Optional[int]]
"""The documents of a set: the last key before theirs, their last key, and their argument, where only that counts."""


@dataclass(frozen=True)
class Cuts:
    """Where the order of all documents is cut.

    The sets have the numbers of the mega-batches, then B for the validation set, B + 1 for the test set (where these
    are drawn), and the numbers after them for the held-out slice of each mega-batch.

    Attributes:
        num_megabatches: B.
        by_argument: each argument is a mega-batch, but for what comes up to the test set's last key.
        held_out: the last keys of the validation and the test set; none where they are not drawn.
        megabatches: the last key of each mega-batch but the last one; none where they are given apart.
        slices: the last key of each mega-batch's held-out slice, if these are asked for.
        total: words of all documents before any was left out.
        num_documents: number of all of them.
        words: of mega-batch 0 without its slice.
        sample: the last key of the tokenizer's sample, of these.
    """

    num_megabatches: int
    by_argument: bool
    held_out: Sequence[int]
    megabatches: Sequence[int]
    slices: Sequence[int] = ()
    total: int = 0
    num_documents: int = 0
    words: int = 0
    sample: int = -1

    @property
    def num_drawn(self) -> int:
        """Number of mega-batches, with validation and test set."""
        return self.num_megabatches + len(self.held_out)

    @property
    def spans(self) -> list["Span"]:
        """The mega-batches with their slices, then the validation and the test set where they are drawn."""
        first = self.held_out[-1] if self.held_out else -1
        megabatches: list[Span]
        if self.by_argument:
            megabatches = [(first, LAST_KEY, number) for number in range(self.num_megabatches)]
        else:
            megabatches = [(*keys, None) for keys in pairwise([first, *self.megabatches, LAST_KEY])]
        return [*megabatches, *((*keys, None) for keys in pairwise([-1, *self.held_out]))]

    def are_held_out(self, records: np.ndarray) -> np.ndarray:
        """Return which of some documents are in the validation or the test set."""
        sets = self.sets_of(records)
        return (sets >= self.num_megabatches) & (sets < self.num_drawn)

    def sets_of(self, records: np.ndarray) -> np.ndarray:
        """Return the set of each of some documents, int16."""
        keys = records["key"]
        lasts = np.array([*self.held_out, *self.megabatches], np.uint64)
        drawn = np.searchsorted(lasts, keys) - len(self.held_out)
        sets = np.where(drawn < 0, drawn + self.num_drawn, records["argument"] if self.by_argument else drawn)
        if self.slices:
            is_megabatch = drawn >= 0
            last_of_slice = np.array(self.slices, np.uint64)[np.where(is_megabatch, sets, 0)]
            sets = np.where(is_megabatch & (keys <= last_of_slice), sets + self.num_drawn, sets)
        return sets.astype(np.int16)


def cut(
    order: KeyOrder, shares: Shares, groups: Sequence[str] = (), max_sample: int = 0, before: Optional[Cuts] = None
) -> Cuts:
    """Cut the documents into sets.

    Args:
        order: of all documents.
        shares: the sets.
        groups: names of the mega-batches, if they have any.
        max_sample: words of the tokenizer's sample.
        before: how they were cut before some were left out, of no validation or test set, which stay.

    Raises:
        AlmaError: the documents do not suffice for so many sets.
    """
    total = order.num_words if before is None else before.total
    valid, test = words_of(shares.valid_bytes, total), words_of(shares.test_bytes, total)
    shares = replace(shares, valid_bytes=valid, test_bytes=test)
    wanted = shares.held_out_words(total)
    _refuse_no_words(shares, sum(wanted), total)
    pieces = 1 if shares.by_argument else shares.num_megabatches
    ends = np.cumsum([*wanted, *[(order.num_words - wanted[0] - wanted[1]) / pieces] * (pieces - 1)])
    if before is not None:
        held_out = before.held_out
    else:
        held_out = [order.end(end) for end in ends[:2]] if shares.held_out else []
    megabatches = [order.end(end) for end in ends[2:]]
    cuts = Cuts(shares.num_megabatches, shares.by_argument, held_out, megabatches, total=total)
    sizes = [_size(order, *span) for span in cuts.spans]
    _refuse_empty_sets(order, sizes, shares, groups, before)
    if shares.holdout_bytes is not None:
        slices = [
            _slice_end(order, shares.holdout_bytes, number, span, size)
            for number, (span, size) in enumerate(zip(cuts.spans, sizes[: shares.num_megabatches], strict=False))
        ]
        cuts = replace(cuts, slices=slices)
    words, sample = _sample(order, cuts, max_sample)
    num_documents = order.num_documents if before is None else before.num_documents
    return replace(cuts, num_documents=num_documents, words=words, sample=sample)


def _size(order: KeyOrder, start: int, end: int, argument: Optional[int]) -> tuple[int, int]:
    """Return the words and the number of the documents behind a key and up to another one."""
    before, reached = order.reached(start, argument), order.reached(end, argument)
    return reached[0] - before[0], reached[1] - before[1]


def _slice_end(order: KeyOrder, words: Words, number: int, span: Span, size: tuple[int, int]) -> int:
    """Return the last key of the first documents of a mega-batch, which are held out of it."""
    start, _, argument = span
    total, num_documents = size
    wanted = words_of(words, total)
    assert wanted is not None
    base = order.reached(start, argument)[0]
    end = max(order.end(base + wanted, argument), order.end(base + 1, argument, including=True))
    if 2 * wanted > total or _size(order, start, end, argument)[1] == num_documents:
        raise AlmaError(
            f"--holdout-bytes {wanted}: mega-batch {number} has {total:,} bytes in {num_documents:,} documents, of "
            "which at most half can be held out; give fewer, or more text"
        )
    return end


def _sample(order: KeyOrder, cuts: Cuts, max_words: int) -> tuple[int, int]:
    """Return the words of mega-batch 0, and the last key of its first documents of ``max_words`` words at most."""
    start, end, argument = cuts.spans[0]
    start = cuts.slices[0] if cuts.slices else start
    base = order.reached(start, argument)[0]
    first, last = (
        order.end(base + 1, argument, including=True),
        order.end(base + max_words + 1, argument, including=False),
    )
    return order.reached(end, argument)[0] - base, min(max(first, last), end)


def _refuse_no_words(shares: Shares, wanted: float, total: int) -> None:
    if wanted < total:
        return
    given = {"--valid-bytes": shares.valid_bytes, "--test-bytes": shares.test_bytes}
    asked = {flag: f"{count:,}" for flag, count in given.items() if count is not None}  # the rest is shared out
    raise AlmaError(
        f"{', '.join(asked)}: {' and '.join(asked.values())} bytes asked for, but there are only {total:,}; give "
        "fewer, or more text"
    )


def _refuse_empty_sets(
    order: KeyOrder, sizes: Sequence[tuple[int, int]], shares: Shares, groups: Sequence[str], before: Optional[Cuts]
) -> None:
    empty = next((number for number, (_, num_documents) in enumerate(sizes) if num_documents <= 0), None)
    if empty is None:
        return
    held_out = {shares.num_megabatches: "the validation set", shares.num_megabatches + 1: "the test set"}
    flag = f"--megabatches {shares.num_megabatches}"
    if shares.by_argument:
        flag = "--by" if groups else "--one-per-input"
    name = held_out.get(empty, f"mega-batch {empty}" + (f" ({groups[empty]})" if empty < len(groups) else ""))
    num_documents = order.num_documents
    if before is not None:
        raise AlmaError(
            f"{flag}: {before.num_documents - num_documents:,} of {before.num_documents:,} documents share words in a "
            f"row with the validation or the test set (--decontaminate-ngram) or are near-duplicates of others, which "
            f"leaves {name} without a document; give other text, or --no-decontaminate"
        )
    advice = (
        "leave out what repeats others, give more text, or smaller --valid-bytes and --test-bytes"
        if shares.by_argument
        else "give fewer mega-batches, more text, or choose --format lines if each line is a document"
    )
    raise AlmaError(
        f"{flag}: {num_documents:,} documents ({order.num_words:,} bytes) leave {name} without a document; {advice}"
    )


def shares_of(work: Work) -> Shares:
    """Return what a command deals into."""
    options = work.options
    return Shares(
        options.num_megabatches or len(work.once(survey_of).groups),
        options.is_given_apart,
        work.there is None,
        options.preset == "paper",
        options.valid_bytes,
        options.test_bytes,
        work.holdout_bytes,
    )


class DealDocuments(SingleStep):
    """Cut the order of all documents into sets."""

    leaves = _DEALT

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`. Raises AlmaError if the documents do not suffice."""
        order = work.once(key_order_of)
        if not order.num_documents:
            raise AlmaError(
                f"INPUT: all {work.once(survey_of).num_documents:,} documents are in the stream already; give text "
                "that it does not have, or --keep-duplicates"
            )
        cuts = cut(order, shares_of(work), work.once(survey_of).groups, work.options.training[1])
        save_cuts(work, _DEALT, cuts)
        yield 0, 0


def save_cuts(work: Work, name: str, cuts: Cuts) -> None:
    """Write a file for `load_cuts`."""
    work.folder.write(name, json.dumps(asdict(cuts)).encode())


def cuts_of(work: Work) -> Cuts:
    """Return how `DealDocuments` has cut."""
    return Cuts(**json.loads(work.folder.read(_DEALT)))
