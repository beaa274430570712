"""Assignment: sizes of sets, held-out parts, the tokenizer's sample, and sizes that the text does not have."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from data_prep.text import steps
from data_prep.text.assignment import Shares, assign, keys_of
from data_prep.text.command import parse_options
from data_prep.text.steps import Plan, Work
from fairseq_alma.errors import AlmaError


def documents(number: int, num_arguments: int = 1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(number)
    sizes = generator.integers(1, 400, number).astype(np.uint32)
    return sizes, generator.integers(0, num_arguments, number).astype(np.uint16)


def bytes_of_sets(sizes: np.ndarray, sets: np.ndarray, shares: Shares) -> list[int]:
    return np.bincount(np.where(sets == shares.num_sets, 0, sets), sizes, shares.num_sets).astype(int).tolist()


@pytest.mark.parametrize("number", [300, 5000])
@pytest.mark.parametrize("num_megabatches", [1, 4, 50])
def test_mega_batches_are_equal_and_held_out_sets_have_their_sizes_to_within_a_document(number, num_megabatches):
    shares = Shares(num_megabatches, valid=1000, test=0.03)
    sizes, arguments = documents(number)
    found = bytes_of_sets(sizes, assign(sizes, arguments, shares), shares)
    assert max(found[:num_megabatches]) - min(found[:num_megabatches]) <= 2 * 400
    assert 1000 <= found[-2] < 1400 and 0 <= found[-1] - round(0.03 * sizes.sum()) < 400


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (10_000, Shares(2), (1000, 2000)),
        (100_000, Shares(2), (6000, 12_000)),
        (10**9, Shares(2), (600_000, 1_200_000)),
        (10**9, Shares(2, test=1000), (500, 1000)),
        (10_000_000, Shares(2, valid=0.01), (100_000, 200_000)),
        (3100, Shares(2, like_paper=True), (100, 1000)),
        (3100, Shares(2, first=1), (0, 0)),
    ],
)
def test_default_sizes_of_validation_and_test_set(total, shares, expected):
    assert shares.held_out_bytes(total) == expected


@pytest.mark.parametrize("by_argument", [False, True])
def test_held_out_parts_are_cut_from_their_mega_batch_and_change_no_other_set(by_argument):
    sizes, arguments = documents(5000, 3)
    before = Shares(3, by_argument, valid=2000, test=5000, sample=20_000)
    after = replace(before, holdout=3000)
    sets = [assign(sizes, arguments, shares) for shares in (before, after)]
    assert 19_600 < sizes[sets[1] == after.num_sets].sum() <= 20_000
    assert all(3000 <= size < 3400 for size in bytes_of_sets(sizes, sets[1], after)[5:])
    joined = np.where(sets[1] == after.num_sets, 0, np.where(sets[1] >= 5, sets[1] - 5, sets[1]))
    assert np.array_equal(joined, np.where(sets[0] == before.num_sets, 0, sets[0]))
    if by_argument:
        assert all(np.array_equal(np.unique(arguments[sets[1] == t]), [t]) for t in (1, 2))


def test_no_long_document_and_at_most_half_of_the_text_is_held_out():
    half, long = ([100] * 8 + [101], 0.5, [100] * 4), ([10_000] + [100] * 400, 0.02, [100] * 10)
    for sizes, holdout, expected in (([37_000, 60], 741, [60]), ([60, 37_000], 741, [60]), half, long):
        found = assign(np.array(sizes), np.zeros(len(sizes), int), Shares(1, first=2, holdout=holdout))
        assert [size for size, place in zip(sizes, found, strict=True) if place == 1] == expected


def test_long_documents_that_would_be_nearly_all_held_out_are_refused():
    sizes = np.array([50] * 9 + [100_000] * 2 + [50] * 3)
    message = r"expected about 18,000 of 200,600 bytes, found 200,450, because documents are"
    with pytest.raises(AlmaError, match=message):
        assign(sizes, np.zeros(14, int), Shares(1))


def test_the_key_of_a_document_follows_from_its_hash_and_the_seed():
    hashes = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert np.array_equal(keys_of(hashes, 3)[::-1], keys_of(hashes[::-1], 3))
    assert not np.array_equal(keys_of(hashes, 3), keys_of(hashes, 4))
    again = keys_of(hashes[[0, 0]], 3, np.arange(2, dtype=np.uint64))
    assert again[0] != again[1]  # kept duplicates may be in different sets


def test_sizes_that_the_text_does_not_have_are_refused():
    with pytest.raises(
        AlmaError, match=r"^--valid-bytes, --test-bytes: .* below the 102,325 .* found 6,000 \+ 100,000;"
    ):
        assign(*documents(500), Shares(2, test=10**5))
    with pytest.raises(AlmaError, match=r"--holdout-bytes 30000: .* half of the [\d,]+ bytes of mega-batch 4 "):
        assign(*documents(500), Shares(3, holdout=30_000, first=4))


def test_assigning_takes_less_than_64_bytes_a_document(tmp_path):
    work, number = Work(str(tmp_path)), 200_000
    work.__dict__["plan"] = Plan(parse_options(["a", "--out", "S", "--megabatches", "3"]), (), ((),) * 4, ())
    records = np.zeros(number, steps._HASHED)
    records["key"], records["bytes"] = keys_of(np.arange(number, dtype=np.uint64), 1), 1000
    for piece in range(4):
        work.save(f"hashed-{piece:05d}", ([""], records[piece::4]))
    tracemalloc.start()
    work.assign()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * number
