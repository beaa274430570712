"""Adam's moments of a split expert, compared with the gradients of its halves."""

import pytest
import torch

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import GATE_TENSOR, grow_mixture, grow_moments
from tests.growth.test_growth import grown_layer, layer_of

SPLIT = grow_mixture(GateTree.flat(2), "split", [1])


def adam(*moments):
    return dict(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(9.0), *moments), strict=True))


def test_halves_have_half_of_the_first_moment_and_the_second_moment_by_signal_and_noise():
    m, v = torch.tensor([[8.0], [1.0], [3.0]]), torch.tensor([[64.0], [4.0], [5.0]])
    growth = grow_mixture(GateTree.flat(3), "split", [0, 1])
    shared = grow_moments("experts.fc1_bias", {**adam(m, v), "momentum": m}, growth, True)
    assert shared["exp_avg"].flatten().tolist() == shared["momentum"].flatten().tolist() == [4.0, 0.5, 3.0, 4.0, 0.5]
    # A quarter for pure signal, up to a half for noise.
    assert shared["exp_avg_sq"].flatten().tolist() == [16.0, 1.75, 5.0, 16.0, 1.75]
    assert shared["step"] == 9
    moment = torch.randn(2, 8)  # moments of gates are not shared
    assert torch.equal(grow_moments(GATE_TENSOR, adam(moment, moment), SPLIT, True)["exp_avg"][:2], moment)


@pytest.fixture(scope="module")
def moments():
    """Moments of the gradients over batches of tokens, of a layer and of the same layer after a split.

    The gradients have a common direction, because the target is the same in all batches.
    """
    layer = layer_of(GateTree.flat(2))
    found = {}
    for key, each in (("whole", layer), ("halves", grown_layer(layer, SPLIT))):
        generator = torch.Generator().manual_seed(3)
        target, gradients = torch.randn(8, generator=generator), []
        for _ in range(600):
            each.zero_grad()
            (each(torch.randn(48, 8, generator=generator))[0] - target).square().mean().backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in each.named_parameters()})
        stacked = {name: torch.stack([gradient[name] for gradient in gradients]) for name in gradients[0]}
        found[key] = {name: (tensor.mean(0), tensor.square().mean(0)) for name, tensor in stacked.items()}
    return found


@pytest.mark.parametrize("name", ["experts.fc1_weight", "experts.fc2_weight", "experts.fc2_bias"])
def test_shared_moments_equal_moments_of_the_gradients_of_the_halves(moments, name):
    shared = grow_moments(name, adam(*moments["whole"][name]), SPLIT, True)
    # Mean of both halves, because a random gate does not split the tokens exactly in the middle.
    first, second = (moments["halves"][name][index][[1, 2]].mean(0).flatten() for index in (0, 1))
    torch.testing.assert_close(first, shared["exp_avg"][1].flatten(), rtol=1e-3, atol=1e-4)
    assert (second / shared["exp_avg_sq"][1].flatten()).median() == pytest.approx(1.0, abs=0.2)
    whole = moments["whole"][name][1][1].flatten()
    assert (second / (whole / 4)).median() > 1.2 and (second / (whole / 2)).median() < 0.95
