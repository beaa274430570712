"""Layers and networks of N members, compared with layers of ``torch.nn``."""

import pytest
import torch
from torch import nn

from fairseq_alma.images import networks
from fairseq_alma.images.stage_trainer import seeded

BATCH, INPUTS, OUTPUTS, SIDE = 6, 3, 5, 7
MEMBERS = [1, 4]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def filled(layer):
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(noise(*parameter.shape, seed=100 + number))
    return layer


def gradients_of(outputs, parameters, weights):
    return torch.autograd.grad((outputs * weights).sum(), list(parameters))


@pytest.mark.parametrize("num_members", MEMBERS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own inputs", "shared inputs"])
def test_a_linear_layer_equals_torchs_layer_of_each_member_forward_and_backward(num_members, is_shared):
    layer = filled(networks.MemberLinear(num_members, INPUTS, OUTPUTS))
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
        expected_gradients = gradients_of(expected, alone.parameters(), weights[member])
        for ours, theirs in zip(found_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours[member], theirs)


@pytest.mark.parametrize("num_members", MEMBERS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own inputs", "shared inputs"])
def test_a_convolution_equals_torchs_layer_of_each_member_forward_and_backward(num_members, is_shared):
    layer = filled(networks.MemberConv2d(num_members, INPUTS, OUTPUTS))
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


@pytest.mark.parametrize(
    ("build", "initial_weights"),
    [(networks.MemberLinear, None), (networks.MemberConv2d, "he"), (networks.MemberConv2d, "default")],
)
def test_initial_weights_of_a_member_depend_only_on_its_generator(build, initial_weights):
    together, alone = build(3, 8, 9), build(1, 8, 9)
    together.initial_weights = alone.initial_weights = initial_weights
    together.reset_parameters([seeded(seed) for seed in (5, 6, 7)])
    alone.reset_parameters([seeded(6)])
    for name, tensor in alone.state_dict().items():
        assert torch.equal(together.state_dict()[name][1], tensor[0])
        assert not torch.equal(together.state_dict()[name][0], tensor[0])


def test_initial_weights_have_the_spread_of_torchs_linear_layers_and_vgg_convolutions():
    linear, convolution = networks.MemberLinear(1, 100, 400), networks.MemberConv2d(1, 20, 60)
    linear.reset_parameters([seeded(1)])
    convolution.reset_parameters([seeded(1)])
    assert linear.weight.abs().max() <= 0.1 and linear.bias.abs().max() <= 0.1  # 1 / sqrt(100), uniform
    assert linear.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert convolution.weight.std().item() == pytest.approx((2 / (9 * 60)) ** 0.5, rel=0.03)


NUM_CLASSES = 5
COLUMN_E = [2, 2, 4, 4, 4]  # Simonyan and Zisserman 2015, table 1, column E, without its three linear layers


def torch_vgg(channels, last_pool="mean"):
    """Return a VGG19 of torch.nn layers, from the paper's description or its released code."""
    layers, inputs = [], 3
    remaining = list(channels)
    for number, group in enumerate(COLUMN_E):
        if number:
            layers.append(nn.MaxPool2d(2, 2))
        for outputs in [remaining.pop(0) for _ in range(group)]:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
    pool = nn.MaxPool2d(2, 2) if last_pool == "max" else nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(inputs, NUM_CLASSES))


def copy_member(network, member, plain):
    state = network.model_states()[member]
    targets = [module for module in plain if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))]
    ours = [f"blocks.{layer}.{part}" for layer in range(networks.NUM_CONVOLUTIONS) for part in ("conv", "norm")]
    for module, name in zip(targets, [*ours, "classifier"], strict=True):
        for parameter in ("weight", "bias"):
            if getattr(module, parameter) is not None:
                getattr(module, parameter).data.copy_(state[f"{name}.{parameter}"][0])
    return plain


@pytest.mark.parametrize(("side", "num_members", "last_pool"), [(16, 1, "mean"), (40, 2, "mean"), (32, 1, "max")])
def test_vgg_computes_the_same_as_an_independent_vgg19_in_training_and_at_test(side, num_members, last_pool):
    channels = [4, 6] * 8
    network = networks.VGG((3, side, side), NUM_CLASSES, channels, num_members, last_pool)
    network.reset_parameters([seeded(member) for member in range(num_members)])
    plain = [copy_member(network, member, torch_vgg(channels, last_pool)) for member in range(num_members)]
    for seed, training in ((1, True), (2, False)):
        images = torch.randn(7, 3, side, side, generator=seeded(seed))
        found = network.train(training)(images)
        assert found.shape == (num_members, 7, NUM_CLASSES)
        for logits, one in zip(found, plain, strict=True):
            torch.testing.assert_close(logits, one.train(training)(images), rtol=1e-3, atol=1e-4)


def test_default_initial_weights_are_those_of_torch():
    network = networks.VGG((3, 32, 32), NUM_CLASSES, [4] * networks.NUM_CONVOLUTIONS, initial_weights="default")
    network.reset_parameters([seeded(1)])
    for block in network.blocks:
        weight = block.conv.weight[0]
        bound = weight[0].numel() ** -0.5  # as torch.nn.Conv2d: kaiming_uniform_ with a = sqrt(5)
        assert 0.8 * bound < weight.abs().max() <= bound


def test_measured_batch_norm_statistics_are_the_mean_over_batches():
    network = networks.VGG((1, 32, 32), 4, [3] * 16, num_members=2)
    network.reset_parameters([seeded(1), seeded(2)])
    images = noise(12, 1, 32, 32)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    networks.measure_batch_norm(network, images.split(4))
    norm = next(module for module in network.modules() if isinstance(module, networks.MemberBatchNorm2d))
    measured = norm.running_mean.flatten().clone(), norm.running_var.flatten().clone()
    seen = []
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network.train()
        for batch in images.split(4):
            network(batch)
    hook.remove()
    means = torch.stack([each.mean(dim=(0, 2, 3)) for each in seen]).mean(dim=0)
    variances = torch.stack([each.var(dim=(0, 2, 3)) for each in seen]).mean(dim=0)
    torch.testing.assert_close(measured, (means, variances))
    assert all(torch.equal(before[name], parameter) for name, parameter in network.named_parameters())
