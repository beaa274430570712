"""What an optimizer takes from a file is its own, or is refused before the first update."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.checkpoint_file import check_optimizer
from tests.test_any_input import IN_A_FOLDER, places, with_value

KINDS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
ODD = st.sampled_from(
    [None, -1, True, 1.5, "x", [], {}, float("nan"), (0.9,), torch.zeros(3), torch.ones(2, 2), torch.tensor(1.0)]
)


def optimizer_after(kind: str, num_updates: int) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    optimizer = KINDS[kind](parameters)
    for _ in range(num_updates):
        update(optimizer)
    return optimizer


def update(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_has_saved_is_taken(kind):
    for num_updates in (0, 2):
        optimizer = optimizer_after(kind, 0)
        optimizer.load_state_dict(optimizer_after(kind, num_updates).state_dict())
        check_optimizer(optimizer)
        update(optimizer)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("state", 1, "exp_avg"), torch.zeros(3), r"exp_avg of parameter 1 is \(3,\), \(4,\) is needed"),
        (("state", 0, "exp_avg_sq"), torch.zeros(()), r"exp_avg_sq of parameter 0 is \(\), \(2, 3\) is needed"),
        (("state", 0, "step"), torch.zeros(2), r"step of parameter 0 is \(2,\), a number of at least 0 is needed"),
        (("state", 0), {"step": 3}, "lacks exp_avg, exp_avg_sq of parameter 0"),
        (("state",), {7: {"step": 3}}, "has other parameters than the 2 of its model"),
        (("param_groups", 0, "betas"), (0.9,), r"has \(0.9,\) as betas"),
        (("param_groups", 0, "amsgrad"), True, "has True as amsgrad"),
        (("param_groups", 0), {"params": [0, 1]}, "lacks the option lr"),
    ],
)
def test_what_does_not_fit_is_named(place, value, said):
    optimizer = optimizer_after("Adam", 0)
    saved = optimizer_after("Adam", 2).state_dict()
    optimizer.load_state_dict(with_value(saved, place, value))
    with pytest.raises(UnfitCheckpoint, match=said):
        check_optimizer(optimizer)


@pytest.mark.parametrize("kind", KINDS)
@settings(IN_A_FOLDER, max_examples=100)
@given(data=st.data())
def test_anything_in_any_place_of_a_state_is_refused_or_makes_an_update(kind, data):
    saved = optimizer_after(kind, 2).state_dict()
    altered = with_value(saved, data.draw(st.sampled_from(places(saved)[1:])), data.draw(ODD))
    optimizer = optimizer_after(kind, 0)
    try:
        optimizer.load_state_dict(altered)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        return  # torch itself saw it, and who calls it makes a line of that
    with contextlib.suppress(UnfitCheckpoint):
        check_optimizer(optimizer)
        update(optimizer)
