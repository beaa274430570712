import math

import pytest
import torch

from fairseq_alma.images.predictions import Tally


def logits_of(*probs):
    return torch.tensor(probs).log()


def test_the_mean_of_probabilities_decides():
    tally = Tally("probabilities")
    tally.add(logits_of([[0.9, 0.1]], [[0.4, 0.6]], [[0.4, 0.6]]))
    result = tally.result(torch.tensor([0]))
    assert result["error"] == 0
    assert result["loss"] == pytest.approx(-math.log(1.7 / 3), abs=1e-6)


def test_a_vote_counts_each_model_once():
    tally = Tally("vote")
    tally.add(logits_of([[0.9, 0.1]], [[0.4, 0.6]], [[0.4, 0.6]]))
    assert tally.result(torch.tensor([0]))["error"] == 1


def test_the_mean_of_probabilities_decides_between_equal_votes():
    tally = Tally("vote")
    tally.add(logits_of([[0.9, 0.1, 0.0001]], [[0.3, 0.6, 0.1]]))
    assert tally.result(torch.tensor([0]))["error"] == 0


def test_the_mean_of_logits_decides_where_it_is_asked_for():
    logits = torch.tensor([[[9.0, 0.0]], [[0.0, 4.0]], [[0.0, 4.0]]])
    for combine, error in (("logits", 0), ("probabilities", 1)):
        tally = Tally(combine)
        tally.add(logits)
        result = tally.result(torch.tensor([0]))
        assert result["error"] == error
        if combine == "logits":
            assert result["loss"] == pytest.approx(math.log1p(math.exp(-1 / 3)))


@pytest.mark.parametrize("combine", ["probabilities", "vote", "logits"])
def test_models_may_be_added_one_by_one(combine):
    logits = torch.randn(5, 20, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 3
    together, one_by_one = Tally(combine), Tally(combine)
    together.add(logits)
    for each in logits:
        one_by_one.add(each[None])
    assert together.result(labels) == one_by_one.result(labels)


def test_a_sure_and_wrong_model_has_a_finite_loss():
    tally = Tally("single")
    tally.add(torch.tensor([[[300.0, 0.0]]]))
    assert tally.result(torch.tensor([1]))["loss"] == pytest.approx(300)
