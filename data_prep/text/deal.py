"""Deal documents at random into mega-batches of equal word counts, a validation set and a test set.

The documents are put into a random order once; the sets are consecutive pieces of that order, cut where the words
reach a set's share. So each set differs from its share by less than one document, whatever the documents' lengths.
The order comes from the documents' content and the seed: no generator whose numbers a new version might change.
"""

from dataclasses import dataclass, replace
from typing import Optional, Union

import numpy as np

from data_prep.text.survey import Survey
from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError

DROPPED = -1
_VALID_SHARE = 0.1  # of a mega-batch
_AT_ONCE = 1 << 20


Words = Union[int, float]
"""A number of words, or, below 1, a share of all there are."""


def words_of(given: Optional[Words], total: int) -> Optional[int]:
    """Return a number of words out of ``total``; None where none is given."""
    if given is None or isinstance(given, int):
        return given
    return max(1, round(given * total))


@dataclass(frozen=True)
class Deal:
    """Where each document goes.

    Attributes:
        sets: ``(documents,)``, int16: number of the mega-batch, then B for the validation set, B + 1 for the test
            set (where these are drawn), the numbers after them for the held-out slice of each mega-batch, and `DROPPED`
            for a duplicate or what is left out.
        order: all but duplicates, in their random order.
        num_duplicates: documents dropped.
    """

    sets: np.ndarray
    order: np.ndarray
    num_duplicates: int


@dataclass(frozen=True)
class Shares:
    """What to deal into.

    Attributes:
        num_megabatches: B.
        by_argument: each argument of the command, or each group, is a mega-batch, instead of equal pieces.
        held_out: whether a validation and a test set are drawn too.
        valid_words: words of the validation set; None for a tenth of a mega-batch. Shares of all are below 1.
        test_words: words of the test set; None for as many as a mega-batch has.
        holdout_words: words of each mega-batch that are held out of it; None: none.
    """

    num_megabatches: int
    by_argument: bool = False
    held_out: bool = True
    valid_words: Optional[Words] = None
    test_words: Optional[Words] = None
    holdout_words: Optional[Words] = None

    @property
    def num_drawn(self) -> int:
        """Number of mega-batches, with validation and test set."""
        return self.num_megabatches + 2 * self.held_out

    def held_out_words(self, total: int) -> tuple[float, float]:
        """Return the words of the validation and of the test set, out of ``total``."""
        if not self.held_out:
            return 0.0, 0.0
        rest = max(total - (self.valid_words or 0) - (self.test_words or 0), 0)
        pieces = self.num_megabatches + (self.valid_words is None) * _VALID_SHARE + (self.test_words is None)
        valid = rest / pieces * _VALID_SHARE if self.valid_words is None else self.valid_words
        test = rest / pieces if self.test_words is None else self.test_words
        return valid, test


def deal_documents(survey: Survey, shares: Shares, seed: int, drop: Optional[np.ndarray]) -> Deal:
    """Decide where each document goes; `deal_again` once it is known what shares words with the held-out sets.

    Args:
        survey: the documents.
        shares: the sets.
        seed: another seed gives another order.
        drop: hashes of documents that are elsewhere already, or None to keep duplicates.

    Raises:
        AlmaError: the documents do not suffice for so many sets.
    """
    given = np.arange(len(survey), dtype=np.uint32)
    if survey.sampled is not None:
        given = given[survey.sampled]
    kept = given if drop is None else given[_first_occurrences(survey.hashes[given], drop)]
    if not len(given):
        raise AlmaError(f"INPUT: none of {len(survey):,} documents is in a share so small; give larger ones")
    if not len(kept):
        raise AlmaError(
            f"INPUT: all {len(given):,} documents are in the stream already; give text that it does not have, or "
            "--keep-duplicates"
        )
    keys = _random_keys(survey.hashes[kept], seed, distinct=drop is not None)
    order = kept[np.argsort(keys, kind="stable")]
    num_duplicates = len(given) - len(kept)
    del keys, given, kept
    return _deal_in_order(survey, shares, order, num_duplicates)


def deal_again(survey: Survey, shares: Shares, deal: Deal, left_out: np.ndarray) -> Deal:
    """Deal without some documents of the mega-batches; what is held out stays, the rest is cut anew.

    Args:
        survey: the documents.
        shares: the sets, as they were dealt into.
        deal: where each document went.
        left_out: ``(documents,)``, bool: documents that belong to no set; none of the validation or test set.

    Raises:
        AlmaError: the rest does not suffice for so many sets.
    """
    return _deal_in_order(survey, shares, deal.order, deal.num_duplicates, left_out[deal.order])


def _deal_in_order(
    survey: Survey, shares: Shares, order: np.ndarray, num_duplicates: int, left_out: Optional[np.ndarray] = None
) -> Deal:
    """Cut the documents, in their random order, into sets; ``left_out`` is in this order too."""
    words = survey.words[order]
    total = int(words.sum(dtype=np.int64))
    valid, test = words_of(shares.valid_words, total), words_of(shares.test_words, total)
    shares = replace(shares, valid_words=valid, test_words=test)
    if left_out is not None:
        words[left_out] = 0
    sets_in_order = _cut(words, shares, survey.arguments[order], total)
    if left_out is not None:
        sets_in_order[left_out] = DROPPED
    _refuse_empty_sets(sets_in_order, words, shares, survey, 0 if left_out is None else int(left_out.sum()))
    _hold_out(sets_in_order, words, shares)
    sets = np.full(len(survey), DROPPED, dtype=np.int16)
    sets[order] = sets_in_order
    return Deal(sets, order, num_duplicates)


def _first_occurrences(hashes: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """Return the numbers of the documents that are the first with their hash and not among ``drop``, ascending."""
    by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
    in_order = hashes[by_hash]
    first = np.ones(len(hashes), dtype=bool)
    first[1:] = in_order[1:] != in_order[:-1]
    if len(drop):
        drop = np.sort(drop)
        place = np.searchsorted(drop, in_order).clip(max=len(drop) - 1)
        first &= drop[place] != in_order
    kept = by_hash[first]
    kept.sort()
    return kept


def _random_keys(hashes: np.ndarray, seed: int, distinct: bool) -> np.ndarray:
    """Turn hashes into random numbers, by the seed; by their position too where contents repeat.

    Args:
        hashes: ``(documents,)``, uint64; overwritten.
        seed: the seed.
        distinct: whether no hash occurs twice.
    """
    hashes ^= scrambled(np.array([seed], dtype=np.uint64))
    for start in range(0, len(hashes), _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, len(hashes)))
        hashes[part] = scrambled(hashes[part])
        if not distinct:
            hashes[part] = scrambled(hashes[part] + np.arange(part.start, part.stop, dtype=np.uint64))
    return hashes


def _cut(words: np.ndarray, shares: Shares, arguments: np.ndarray, total: int) -> np.ndarray:
    """Return the set of each document; documents, words and arguments are in the random order.

    What is left out has no words here, but counts in the ``total`` that validation and test set are a share of.
    """
    valid, test = shares.held_out_words(total)
    num_megabatches = shares.num_megabatches
    if valid + test >= total:
        given = {"--valid-words": shares.valid_words, "--test-words": shares.test_words}
        asked = {flag: f"{count:,}" for flag, count in given.items() if count is not None}  # the rest is shared out
        raise AlmaError(
            f"{', '.join(asked)}: {' and '.join(asked.values())} words asked for, but there are only {total:,}; give "
            "fewer, or more text"
        )
    pieces = 1 if shares.by_argument else num_megabatches
    left = int(words.sum(dtype=np.int64))
    targets = [valid, test] + [(left - valid - test) / pieces] * (pieces - 1)
    ends = _nearest_ends(words, np.cumsum(targets))
    sets = np.empty(len(words), dtype=np.int16)
    held_out = [num_megabatches, num_megabatches + 1]
    for number, start, end in zip([*held_out, *range(pieces)], [0, *ends], [*ends, len(words)], strict=True):
        sets[start:end] = number
    if shares.by_argument:
        sets[ends[1] :] = arguments[ends[1] :]
    return sets


def _nearest_ends(words: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return how many documents to take so that their words come nearest to each target.

    With documents of 3, 3 and 4 words, the targets 0, 5 and 7 give 0, 2 (6 words) and 2.
    """
    reached = np.cumsum(words, dtype=np.int64)
    ends = []
    for target in targets:
        last = min(int(np.searchsorted(reached, target)), len(words) - 1)  # the document that reaches it
        before = int(reached[last - 1]) if last else 0
        ends.append(last if target - before < reached[last] - target else last + 1)
    return ends


def _hold_out(sets: np.ndarray, words: np.ndarray, shares: Shares) -> None:
    """Move the first documents of each mega-batch, in the random order, to its held-out slice."""
    if shares.holdout_words is None:
        return
    for megabatch in range(shares.num_megabatches):
        members = np.flatnonzero(sets == megabatch)
        total = int(words[members].sum(dtype=np.int64))
        wanted = words_of(shares.holdout_words, total)
        assert wanted is not None
        end = max(1, *_nearest_ends(words[members], np.array([wanted])))
        if 2 * wanted > total or end == len(members):
            raise AlmaError(
                f"--holdout-words {wanted}: mega-batch {megabatch} has {total:,} words in "
                f"{len(members):,} documents, of which at most half can be held out; give fewer, or more text"
            )
        sets[members[:end]] = shares.num_drawn + megabatch


def _refuse_empty_sets(sets: np.ndarray, words: np.ndarray, shares: Shares, survey: Survey, num_left_out: int) -> None:
    num_sets = shares.num_drawn
    counts = np.zeros(num_sets, dtype=np.int64)
    for start in range(0, len(sets), _AT_ONCE):
        part = sets[start : start + _AT_ONCE]
        counts += np.bincount(part[part != DROPPED], minlength=num_sets)
    if counts.all():
        return
    empty = int(np.argmin(counts))
    held_out = {shares.num_megabatches: "the validation set", shares.num_megabatches + 1: "the test set"}
    flag = f"--megabatches {shares.num_megabatches}"
    if shares.by_argument:
        flag = "--by" if survey.groups else "--one-per-input"
    name = f"mega-batch {empty}" + (f" ({survey.groups[empty]})" if empty < len(survey.groups) else "")
    if num_left_out:
        raise AlmaError(
            f"{flag}: {num_left_out:,} of {len(words):,} documents share words in a row with the validation or the "
            f"test set (--decontaminate-ngram), which leaves {held_out.get(empty, name)} without a document; give "
            "other text, or --no-decontaminate"
        )
    advice = (
        "leave out what repeats others, give more text, or smaller --valid-words and --test-words"
        if shares.by_argument
        else "give fewer mega-batches, more text, or choose --format lines if each line is a document"
    )
    raise AlmaError(
        f"{flag}: {len(words):,} documents ({int(words.sum(dtype=np.int64)):,} words) leave "
        f"{held_out.get(empty, name)} without a document; {advice}"
    )
