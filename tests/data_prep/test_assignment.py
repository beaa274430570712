"""The deal: sizes of sets, held-out parts and the sample, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from data_prep.text.assignment import DROPPED, LAST_KEY, NUM_PREFIXES, KeyOrder, Shares, cut, keys_of
from data_prep.text.tokenizer import vocab_size_for
from fairseq_alma.errors import AlmaError


class Documents:
    """Documents with random keys, in the order of the keys."""

    def __init__(self, number: int, num_arguments: int = 1, longest: int = 400) -> None:
        generator = np.random.default_rng(number)
        self.keys = np.sort(keys_of(np.arange(number, dtype=np.uint64), 1))
        self.sizes = generator.integers(1, longest, number).astype(np.uint32)
        self.arguments = generator.integers(0, num_arguments, number).astype(np.uint16)
        self.prefixes = (self.keys >> np.uint64(56)).astype(int)
        self.order = KeyOrder(self.totals(num_arguments), self.load)

    def totals(self, num_arguments: int) -> np.ndarray:
        totals = np.zeros((NUM_PREFIXES, num_arguments), np.int64)
        np.add.at(totals, (self.prefixes, self.arguments), self.sizes)
        return totals

    def load(self, prefix: int) -> np.ndarray:
        own = np.flatnonzero(self.prefixes == prefix)
        records = np.zeros(len(own), [("key", "<u8"), ("bytes", "<u4"), ("argument", "<u2")])
        records["key"], records["bytes"], records["argument"] = self.keys[own], self.sizes[own], self.arguments[own]
        return records

    def sets(self, cuts) -> list[int]:
        """Bytes of each set."""
        return np.bincount(cuts.sets_of(self.keys, self.arguments), self.sizes, cuts.num_sets).astype(int).tolist()


@pytest.mark.parametrize("number", [300, 5000])
@pytest.mark.parametrize("num_megabatches", [1, 4, 50])
def test_mega_batches_are_equal_and_held_out_sets_as_large_as_asked_to_within_a_document(number, num_megabatches):
    documents = Documents(number)
    sizes = documents.sets(cut(documents.order, Shares(num_megabatches, valid=1000, test=0.03)))
    assert max(sizes[:num_megabatches]) - min(sizes[:num_megabatches]) <= 2 * 400
    assert 1000 <= sizes[-2] < 1400 and 0 <= sizes[-1] - round(0.03 * documents.sizes.sum()) < 400


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (10_000, Shares(2), (1000, 2000)),
        (100_000, Shares(2), (6000, 12_000)),
        (10_000_000, Shares(2), (100_000, 200_000)),
        (10**9, Shares(2), (600_000, 1_200_000)),
        (10**9, Shares(2, test=1000), (500, 1000)),
        (10_000_000, Shares(2, valid=0.01), (100_000, 200_000)),
        (3100, Shares(2, like_paper=True), (100, 1000)),
        (3100, Shares(2, held_out=False), (0, 0)),
    ],
)
def test_sizes_of_validation_and_test_set_that_are_not_given(total, shares, expected):
    assert shares.held_out_bytes(total) == expected


def test_a_document_larger_than_a_held_out_set_does_not_leave_the_other_one_empty():
    documents = Documents(12, longest=100_000)
    assert min(documents.sets(cut(documents.order, Shares(2)))) > 0


@pytest.mark.parametrize("by_argument", [False, True])
def test_held_out_parts_come_out_of_their_mega_batch_and_change_no_other_set(by_argument):
    documents = Documents(5000, 3)
    shares = Shares(3, by_argument, valid=2000, test=5000, sample=20_000)
    before, after = cut(documents.order, shares), cut(documents.order, replace(shares, holdout=3000))
    sets = [cuts.sets_of(documents.keys, documents.arguments) for cuts in (before, after)]
    assert np.array_equal(np.where(sets[1] >= 5, sets[1] - 5, sets[1]), sets[0])
    assert all(3000 <= size < 3400 for size in documents.sets(after)[5:])
    if by_argument:
        assert all(np.array_equal(np.unique(documents.arguments[sets[1] == t]), [t]) for t in range(3))
    sample = documents.sizes[(sets[1] == 0) & (documents.keys <= np.uint64(after.sample))]
    assert 19_600 < sample.sum() <= 20_000


def test_the_set_of_a_document_follows_from_its_hash_the_seed_and_the_cuts_alone():
    hashes = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert np.array_equal(keys_of(hashes, 3)[::-1], keys_of(hashes[::-1], 3))
    assert not np.array_equal(keys_of(hashes, 3), keys_of(hashes, 4))
    again = keys_of(hashes[[0, 0]], 3, np.arange(2, dtype=np.uint64))
    assert again[0] != again[1]  # equal texts that are kept need not be together
    assert DROPPED < 0 < LAST_KEY


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            Shares(2, valid=10**9),
            r"^--valid-bytes: 1,000,000,000 bytes asked for, but there are only [\d,]+; give fewer",
        ),
        (Shares(2, valid=1, test=10**6), r"^--valid-bytes, --test-bytes: 1 and 1,000,000 bytes asked for, but"),
        (Shares(3, holdout=30_000), r"--holdout-bytes 30000: mega-batch 0 has [\d,]+ bytes, of which at most half"),
    ],
)
def test_sizes_that_the_text_does_not_have_are_refused(shares, message):
    with pytest.raises(AlmaError, match=message):
        cut(Documents(500).order, shares)


def test_the_vocabulary_size_follows_from_bytes_in_any_script():
    assert [vocab_size_for(size) for size in (0, 1000, 1_290_000, 10**8, 10**12)] == [512, 512, 2048, 16_384, 32_768]
