"""The deal: equal sets, at random, cut out of an order of which only some buckets are looked into."""

from dataclasses import replace

import numpy as np
import pytest

from data_prep.text.buckets import KEYED, LAST_KEY, KeyOrder
from data_prep.text.deal import Shares, cut
from fairseq_alma.errors import AlmaError


def make_records(num_documents=5000, seed=0, arguments=1, words=None):
    """Documents of very different lengths in the order of their keys."""
    generator = np.random.default_rng(seed)
    records = np.zeros(num_documents, KEYED)
    records["key"] = np.sort(generator.integers(0, LAST_KEY, num_documents, dtype=np.uint64, endpoint=True))
    records["words"] = words or np.minimum(generator.pareto(1.5, num_documents) * 20 + 1, 1000)
    records["argument"] = generator.permutation(np.arange(num_documents) * arguments // num_documents)
    return records


def order_of(records, num_buckets=4, opened=None):
    """The order of documents in buckets, of which those that are looked into are added to ``opened``."""
    ends = [(number + 1) * (LAST_KEY + 1) // num_buckets - 1 for number in range(num_buckets)]
    parts = np.split(records, np.searchsorted(records["key"], np.array(ends, np.uint64), side="right")[:-1])
    width = int(records["argument"].max()) + 1
    words = [np.bincount(part["argument"], part["words"], width) for part in parts]
    documents = [np.bincount(part["argument"], minlength=width) for part in parts]

    def load(bucket):
        if opened is not None:
            opened.add(bucket)
        return parts[bucket]

    return KeyOrder(np.array(words).astype(np.int64), np.array(documents), load)


def words_per_set(records, sets, num_sets):
    return np.bincount(sets, records["words"], minlength=num_sets)


@pytest.mark.parametrize("num_megabatches", [1, 4, 50])
@pytest.mark.parametrize("seed", [1, 2])
def test_megabatches_are_equal_within_one_percent_or_one_document(num_megabatches, seed):
    records = make_records(seed=seed)
    cuts = cut(order_of(records), Shares(num_megabatches))
    words = words_per_set(records, cuts.sets_of(records), num_megabatches + 2)
    share = words.sum() / (num_megabatches + 1.1)
    tolerance = max(0.01 * share, records["words"].max())
    assert abs(words[:num_megabatches] - share).max() <= tolerance
    assert abs(words[num_megabatches] - 0.1 * share) <= tolerance
    assert abs(words[num_megabatches + 1] - share) <= tolerance
    assert cuts.words == words[0]


@pytest.mark.parametrize(("by_argument", "holdout_words"), [(False, None), (False, 0.02), (True, None), (True, 50)])
def test_the_number_of_buckets_decides_nothing(by_argument, holdout_words):
    records = make_records(600, arguments=3)
    shares = Shares(3, by_argument, valid_words=300, test_words=1000, holdout_words=holdout_words)
    left_out = records[cut(order_of(records), shares).sets_of(records) < 3][::7]
    for num_buckets in (1, 8, 256):
        order = order_of(records, num_buckets)
        cuts = cut(order, shares, max_sample=777)
        again = cut(order.without(left_out), shares, before=cuts)
        if num_buckets == 1:
            expected = cuts, again
        assert (cuts, again) == expected


def test_only_buckets_with_a_cut_are_looked_into():
    opened = set()
    cut(order_of(make_records(), 64, opened), Shares(3, holdout_words=100), max_sample=5000)
    assert 0 < len(opened) <= 10  # ends of five sets, of three slices, and of the sample


def test_each_end_is_that_of_the_plain_sum():
    records = make_records(300)
    order, reached = order_of(records, 16), np.cumsum(records["words"], dtype=np.int64)
    for target in (0.5, 17, 400.25, int(reached[77]), int(reached[-1]) - 1, int(reached[-1]) + 5):
        number = min(int(np.searchsorted(reached, target)), 299)
        before = int(reached[number - 1]) if number else 0
        for including, expected in ((True, number + 1), (False, number), (None, None)):
            if target > reached[-1]:
                expected = 300
            if expected is None:
                expected = number if target - before < reached[number] - target else number + 1
            key = order.end(target, including=including)
            assert order.reached(key) == (int(reached[expected - 1]) if expected else 0, expected)


def test_held_out_sets_have_the_words_asked_for():
    records = make_records()
    cuts = cut(order_of(records), Shares(3, valid_words=2000, test_words=5000))
    words = words_per_set(records, cuts.sets_of(records), 5)
    assert abs(words[3:] - [2000, 5000]).max() <= records["words"].max() / 2


@pytest.mark.parametrize("by_argument", [False, True])
def test_held_out_slices_are_taken_out_of_the_mega_batches_and_nothing_else(by_argument):
    records = make_records(arguments=3)
    shares = Shares(3, by_argument, valid_words=2000, test_words=5000)
    before = cut(order_of(records), shares).sets_of(records)
    after = cut(order_of(records), replace(shares, holdout_words=900)).sets_of(records)
    words = words_per_set(records, after, 8)
    assert abs(words[5:] - 900).max() <= records["words"].max() / 2
    assert (np.where(after >= 5, after - 5, after) == before).all()


def test_the_sample_is_the_beginning_of_the_first_mega_batch_and_at_least_a_document():
    records = make_records(words=10)
    for max_sample, expected in ((1, 10), (250, 250), (259, 250), (10**9, None)):
        cuts = cut(order_of(records), Shares(3, holdout_words=100), max_sample=max_sample)
        first = cuts.sets_of(records) == 0
        sample = records[first & (records["key"] <= np.uint64(cuts.sample))]
        assert sample["words"].sum() == (records["words"][first].sum() if expected is None else expected)
        assert sample["key"][0] == records["key"][first][0]


def test_what_is_held_out_stays_when_documents_are_left_out():
    """Else the document behind the one that is left out would end the test set nearer to its share."""
    records = make_records(200, words=10)
    records["words"][20] = 5
    order, shares = order_of(records), Shares(2, valid_words=100, test_words=94)
    cuts = cut(order, shares)
    again = cut(order.without(records[19:20]), shares, before=cuts)
    for sets in (cuts.sets_of(records), again.sets_of(records)):
        assert np.flatnonzero(sets == 3).tolist() == [*range(10, 19)]


def test_a_slice_of_more_than_half_of_a_mega_batch_is_refused():
    message = r"--holdout-words 9000: mega-batch 0 has [\d,]+ words in [\d,]+ documents, of which at most half"
    with pytest.raises(AlmaError, match=message):
        cut(order_of(make_records(300)), Shares(3, holdout_words=9000))


def test_one_per_input_keeps_each_argument_together():
    records = make_records(arguments=3)
    sets = cut(order_of(records), Shares(3, by_argument=True)).sets_of(records)
    for argument in range(3):
        assert set(sets[records["argument"] == argument]) == {argument, 3, 4}


def test_later_arrivals_have_no_held_out_sets():
    records = make_records()
    assert set(cut(order_of(records), Shares(3, held_out=False)).sets_of(records)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (Shares(20), r"--megabatches 20: 10 documents .* leave mega-batch \d+ without a document"),
        (Shares(2, valid_words=10**9), "^--valid-words: 1,000,000,000 words asked for, but there are only 1,000; give"),
        (Shares(2, test_words=1000), "^--test-words: 1,000 words asked for, but there are only 1,000; give fewer, or"),
        (Shares(2, valid_words=1, test_words=1000), "^--valid-words, --test-words: 1 and 1,000 words asked for, but"),
        (Shares(2, valid_words=1), "leave the validation set without a document"),
        (Shares(2, by_argument=True), "--one-per-input: .* leave mega-batch 1 without a document"),
    ],
)
def test_too_few_documents_are_refused(shares, message):
    order = order_of(make_records(10, words=100))
    if shares.by_argument:
        order = KeyOrder(np.pad(order.words, ((0, 0), (0, 1))), np.pad(order.documents, ((0, 0), (0, 1))), order._load)
    with pytest.raises(AlmaError, match=message):
        cut(order, shares)
