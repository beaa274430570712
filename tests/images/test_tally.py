import math

import pytest
import torch

from fairseq_alma.images.model_store import Tally


def logits_of(*probs):
    return torch.tensor(probs).log()


THREE, SURE = logits_of([[0.9, 0.1]], [[0.4, 0.6]], [[0.4, 0.6]]), [[[9.0, 0.0]], [[0.0, 4.0]], [[0.0, 4.0]]]


@pytest.mark.parametrize(
    ("combine", "logits", "error", "loss"),
    [
        ("probabilities", THREE, 0, -math.log(1.7 / 3)),
        ("vote", THREE, 1, -math.log(1.7 / 3)),  # each model counts once
        ("vote", logits_of([[0.9, 0.1, 0.0001]], [[0.3, 0.6, 0.1]]), 0, None),  # of equal votes the mean
        ("logits", torch.tensor(SURE), 0, math.log1p(math.exp(-1 / 3))),
        ("probabilities", torch.tensor(SURE), 1, None),
    ],
)
def test_what_is_asked_for_decides(combine, logits, error, loss):
    tally = Tally(combine)
    tally.add(logits)
    result = tally.result(torch.tensor([0]))
    assert result["error"] == error
    assert loss is None or result["loss"] == pytest.approx(loss, abs=1e-6)


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
