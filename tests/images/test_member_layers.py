"""Layers of N members against N layers of ``torch.nn``, each on its own."""

import pytest
import torch
from torch import nn

from fairseq_alma.images.networks import MemberBatchNorm2d, MemberConv2d, MemberLinear

BATCH, INPUTS, OUTPUTS, SIDE = 6, 3, 5, 7
MEMBERS = [1, 4]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def filled(layer):
    """Give every parameter values of its own."""
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(noise(*parameter.shape, seed=100 + number))
    return layer


def gradients_of(outputs, parameters, weights):
    return torch.autograd.grad((outputs * weights).sum(), list(parameters))


@pytest.mark.parametrize("num_members", MEMBERS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own inputs", "shared inputs"])
def test_linear_layers_are_those_of_each_member_forward_and_backward(num_members, is_shared):
    layer = filled(MemberLinear(num_members, INPUTS, OUTPUTS))
    x = noise(BATCH, INPUTS) if is_shared else noise(num_members, BATCH, INPUTS)
    weights = noise(num_members, BATCH, OUTPUTS, seed=1)
    found = layer(x)
    assert found.shape == (num_members, BATCH, OUTPUTS)
    found_gradients = gradients_of(found, layer.parameters(), weights)
    for member in range(num_members):
        alone = nn.Linear(INPUTS, OUTPUTS)
        alone.load_state_dict({name: tensor[member] for name, tensor in layer.state_dict().items()})
        expected = alone(x if is_shared else x[member])
        torch.testing.assert_close(found[member], expected)
        for ours, theirs in zip(
            found_gradients, gradients_of(expected, alone.parameters(), weights[member]), strict=True
        ):
            torch.testing.assert_close(ours[member], theirs)


@pytest.mark.parametrize("num_members", MEMBERS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own inputs", "shared inputs"])
def test_convolutions_are_those_of_each_member_forward_and_backward(num_members, is_shared):
    layer = filled(MemberConv2d(num_members, INPUTS, OUTPUTS))
    x = noise(BATCH, INPUTS if is_shared else num_members * INPUTS, SIDE, SIDE)
    weights = noise(BATCH, num_members * OUTPUTS, SIDE, SIDE, seed=1)
    found = layer(x)
    (found_gradient,) = gradients_of(found, layer.parameters(), weights)
    for member in range(num_members):
        alone = nn.Conv2d(INPUTS, OUTPUTS, 3, padding=1, bias=False)
        alone.weight.data.copy_(layer.weight[member])
        ours, own = slice(member * OUTPUTS, (member + 1) * OUTPUTS), slice(member * INPUTS, (member + 1) * INPUTS)
        expected = alone(x if is_shared else x[:, own])
        torch.testing.assert_close(found[:, ours], expected, rtol=1e-4, atol=1e-5)
        (expected_gradient,) = gradients_of(expected, alone.parameters(), weights[:, ours])
        torch.testing.assert_close(found_gradient[member], expected_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_members", MEMBERS)
def test_batch_norm_trains_and_tests_each_member_on_its_own_statistics(num_members):
    layer = filled(MemberBatchNorm2d(num_members, OUTPUTS))
    alone = [nn.BatchNorm2d(OUTPUTS) for _ in range(num_members)]
    for member, one in enumerate(alone):
        one.weight.data.copy_(layer.weight[member])
        one.bias.data.copy_(layer.bias[member])
    for step, training in enumerate([True, True, False]):
        x = 2 + 3 * noise(BATCH, num_members * OUTPUTS, SIDE, SIDE, seed=step)
        found = layer.train(training)(x)
        expected = [one.train(training)(part) for one, part in zip(alone, x.split(OUTPUTS, dim=1), strict=True)]
        torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)
    for member, one in enumerate(alone):
        torch.testing.assert_close(layer.running_mean[member], one.running_mean)
        torch.testing.assert_close(layer.running_var[member], one.running_var)


@pytest.mark.parametrize(
    "build", [lambda members: MemberLinear(members, 40, 50), lambda members: MemberConv2d(members, 8, 9)]
)
def test_a_member_begins_as_its_own_generator_says_whoever_stands_beside_it(build):
    together, alone = build(3), build(1)
    together.reset_parameters([seeded(seed) for seed in (5, 6, 7)])
    alone.reset_parameters([seeded(6)])
    for name, tensor in alone.state_dict().items():
        assert torch.equal(together.state_dict()[name][1], tensor[0])
        assert not torch.equal(together.state_dict()[name][0], tensor[0])


def test_first_weights_are_spread_as_those_of_torch_linear_layers_and_of_vgg_convolutions():
    linear, convolution = MemberLinear(1, 100, 400), MemberConv2d(1, 20, 60)
    linear.reset_parameters([seeded(1)])
    convolution.reset_parameters([seeded(1)])
    assert linear.weight.abs().max() <= 0.1 and linear.bias.abs().max() <= 0.1  # 1 / sqrt(100), uniform
    assert linear.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert convolution.weight.std().item() == pytest.approx((2 / (9 * 60)) ** 0.5, rel=0.03)
