"""The deal: equal sets, at random, from content and seed alone."""

import numpy as np
import pytest

from data_prep.text.deal import DROPPED, Shares, deal_documents
from data_prep.text.survey import Survey
from fairseq_alma.errors import AlmaError

NOTHING = np.empty(0, np.uint64)


def make_survey(num_documents=5000, seed=0, arguments=1):
    """Documents of very different lengths."""
    generator = np.random.default_rng(seed)
    return Survey(
        hashes=generator.integers(0, 2**63, num_documents).astype(np.uint64),
        words=np.minimum(generator.pareto(1.5, num_documents) * 20 + 1, 1000).astype(np.uint32),
        arguments=np.arange(num_documents) * arguments // num_documents,
        piece_sizes=np.array([num_documents]),
    )


def words_per_set(survey, deal, num_sets):
    return np.bincount(deal.sets[deal.sets >= 0], survey.words[deal.sets >= 0], minlength=num_sets)


@pytest.mark.parametrize("num_megabatches", [1, 4, 50])
@pytest.mark.parametrize("seed", [1, 2])
def test_megabatches_are_equal_within_one_percent_or_one_document(num_megabatches, seed):
    survey = make_survey(seed=seed)
    deal = deal_documents(survey, Shares(num_megabatches), seed, NOTHING)
    words = words_per_set(survey, deal, num_megabatches + 2)
    share = words.sum() / (num_megabatches + 1.1)
    tolerance = max(0.01 * share, survey.words.max())
    assert abs(words[:num_megabatches] - share).max() <= tolerance
    assert abs(words[num_megabatches] - 0.1 * share) <= tolerance
    assert abs(words[num_megabatches + 1] - share) <= tolerance


def test_held_out_sets_have_the_words_asked_for():
    survey = make_survey()
    deal = deal_documents(survey, Shares(3, valid_words=2000, test_words=5000), 1, NOTHING)
    words = words_per_set(survey, deal, 5)
    assert abs(words[3:] - [2000, 5000]).max() <= survey.words.max() / 2


@pytest.mark.parametrize("by_argument", [False, True])
def test_held_out_slices_are_taken_out_of_the_mega_batches_and_nothing_else(by_argument):
    survey = make_survey(arguments=3)
    shares = {"by_argument": by_argument, "valid_words": 2000, "test_words": 5000}
    before = deal_documents(survey, Shares(3, **shares), 1, NOTHING).sets
    after = deal_documents(survey, Shares(3, **shares, holdout_words=900), 1, NOTHING)
    words = words_per_set(survey, after, 8)
    assert abs(words[5:] - 900).max() <= survey.words.max() / 2
    assert (np.where(after.sets >= 5, after.sets - 5, after.sets) == before).all()


def test_a_slice_of_more_than_half_of_a_mega_batch_is_refused():
    message = r"--holdout-words 9000: mega-batch 0 has [\d,]+ words in [\d,]+ documents, of which at most half"
    with pytest.raises(AlmaError, match=message):
        deal_documents(make_survey(300), Shares(3, holdout_words=9000), 1, NOTHING)


def test_deal_of_content_does_not_depend_on_the_order_of_the_input():
    survey = make_survey()
    deal = deal_documents(survey, Shares(4), 7, NOTHING)
    shuffled = np.random.default_rng(1).permutation(len(survey))
    again = Survey(survey.hashes[shuffled], survey.words[shuffled], survey.arguments, survey.piece_sizes)
    assert (deal_documents(again, Shares(4), 7, NOTHING).sets == deal.sets[shuffled]).all()


def test_another_seed_deals_otherwise_and_neighbours_are_parted():
    survey = make_survey()
    first, second = (deal_documents(survey, Shares(4), seed, NOTHING).sets for seed in (1, 2))
    assert 0.1 < (first == second).mean() < 0.4
    assert 0.1 < (first[1:] == first[:-1]).mean() < 0.4


def test_duplicates_and_what_is_elsewhere_are_dropped_and_counted():
    survey = make_survey(1000)
    survey.hashes[500:600] = survey.hashes[:100]
    deal = deal_documents(survey, Shares(2), 1, drop=survey.hashes[990:])
    assert deal.num_duplicates == 110
    assert (np.flatnonzero(deal.sets == DROPPED) == [*range(500, 600), *range(990, 1000)]).all()


def test_kept_duplicates_are_dealt_apart():
    survey = make_survey(1000)
    survey.hashes[:] = 5
    deal = deal_documents(survey, Shares(4), 1, drop=None)
    assert deal.num_duplicates == 0
    assert 0.1 < (deal.sets[1:] == deal.sets[:-1]).mean() < 0.4


def test_one_per_input_keeps_each_argument_together():
    survey = make_survey(arguments=3)
    deal = deal_documents(survey, Shares(3, by_argument=True), 1, NOTHING)
    for argument in range(3):
        assert set(deal.sets[survey.arguments == argument]) == {argument, 3, 4}


def test_later_arrivals_have_no_held_out_sets():
    survey = make_survey()
    deal = deal_documents(survey, Shares(3, held_out=False), 1, NOTHING)
    assert set(deal.sets) == {0, 1, 2}


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
    survey = make_survey(10)
    survey.words[:] = 100
    with pytest.raises(AlmaError, match=message):
        deal_documents(survey, shares, 1, NOTHING)


def test_nothing_new_is_refused():
    survey = make_survey(10)
    with pytest.raises(AlmaError, match="all 10 documents are in the stream already"):
        deal_documents(survey, Shares(1), 1, drop=survey.hashes)
