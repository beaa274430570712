"""The VGG network against one that is built here from torch's own layers."""

import pytest
import torch
from torch import nn

from fairseq_alma.growth.firefly_selection import num_chain_parameters
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, MemberConv2d, MemberLinear, Variant

NUM_CLASSES = 5
COLUMN_E = [2, 2, 4, 4, 4]  # Simonyan and Zisserman 2015, table 1, column E, without its three linear layers


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def torch_vgg(channels, image_channels=3, last_pool="mean"):
    """Nothing shared with the package but the paper's description, or that of its released code."""
    layers, inputs = [], image_channels
    remaining = list(channels)
    for number, group in enumerate(COLUMN_E):
        if number:
            layers.append(nn.MaxPool2d(2, 2))
        for outputs in [remaining.pop(0) for _ in range(group)]:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
    if last_pool == "max":
        return nn.Sequential(*layers, nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES))


def copy_member(network, member, plain):
    """Give the plain network the weights of a member, layer by layer."""
    state = network.member_state(member)
    wanted = [module for module in plain if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))]
    ours = [f"blocks.{layer}.{part}" for layer in range(NUM_CONVOLUTIONS) for part in ("conv", "norm")]
    for module, name in zip(wanted, [*ours, "classifier"], strict=True):
        for parameter in ("weight", "bias"):
            if getattr(module, parameter) is not None:
                getattr(module, parameter).data.copy_(state[f"{name}.{parameter}"][0])
    return plain


@pytest.mark.parametrize("side", [16, 32, 40])
@pytest.mark.parametrize("num_members", [1, 2])
def test_it_computes_what_an_independent_vgg19_computes_in_training_and_at_test(side, num_members):
    channels = [4, 6] * 8
    network = VGG((3, side, side), NUM_CLASSES, channels, num_members)
    network.reset_parameters([seeded(member) for member in range(num_members)])
    plain = [copy_member(network, member, torch_vgg(channels)) for member in range(num_members)]
    for seed, training in ((1, True), (2, False)):
        images = torch.randn(7, 3, side, side, generator=seeded(seed))
        found = network.train(training)(images)
        assert found.shape == (num_members, 7, NUM_CLASSES)
        for logits, one in zip(found, plain, strict=True):
            torch.testing.assert_close(logits, one.train(training)(images), rtol=1e-3, atol=1e-4)


def test_the_network_of_the_released_code_ends_in_a_fifth_max_pooling_and_has_torchs_initial_weights():
    channels = [4] * NUM_CONVOLUTIONS
    network = VGG((3, 32, 32), NUM_CLASSES, channels, variant=Variant("max", "default"))
    network.reset_parameters([seeded(1)])
    plain = copy_member(network, 0, torch_vgg(channels, last_pool="max"))
    images = torch.randn(7, 3, 32, 32, generator=seeded(1))
    torch.testing.assert_close(network(images)[0], plain(images), rtol=1e-3, atol=1e-4)
    for block in network.blocks:
        weight = block.conv.weight[0]
        bound = weight[0].numel() ** -0.5  # as torch.nn.Conv2d: kaiming_uniform_ with a = sqrt(5)
        assert 0.8 * bound < weight.abs().max() <= bound


def test_members_may_have_images_of_their_own():
    network = VGG((3, 16, 16), NUM_CLASSES, [4] * NUM_CONVOLUTIONS, num_members=2)
    network.reset_parameters([seeded(1), seeded(2)])
    images = torch.randn(2, 6, 3, 16, 16, generator=seeded(3))
    found = network.eval()(images)
    for member in range(2):
        torch.testing.assert_close(found[member], network(images[member])[member], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channels", [[4] * 16, [64] * 16, [3, 5] * 8])
def test_it_has_sixteen_convolutions_a_linear_layer_and_the_parameters_of_the_formula(channels):
    network = VGG((3, 32, 32), 10, channels)
    kinds = [type(module) for module in network.modules()]
    assert kinds.count(MemberConv2d) == 16 and kinds.count(MemberLinear) == 1
    expected = sum(9 * before * after + 2 * after for before, after in zip([3, *channels], channels, strict=False))
    expected += channels[-1] * 10 + 10
    assert sum(parameter.numel() for parameter in network.parameters()) == expected
    assert num_chain_parameters(3, channels, 10) == expected
