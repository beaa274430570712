import pytest
import torch

from fairseq_alma.images.firefly import FEWEST_NEW, grow_on_images, growth_flops
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, count_flops
from fairseq_alma.images.stage_images import seeded
from tests.images.image_streams import NUM_CLASSES, make_images

SHAPE, CHANNELS = (3, 16, 16), [4] * NUM_CONVOLUTIONS
SIDES = [16] * 2 + [8] * 2 + [4] * 4 + [2] * 4 + [1] * 4


def network_of(channels):
    network = VGG(SHAPE, NUM_CLASSES, channels)
    network.reset_parameters([seeded(1)])
    return network


def candidate_forward_flops(channels, num_new):
    """Two for each weight and pixel: every channel, its split, the new ones, and what hears the new ones before."""
    total, inputs, new_before = 0, SHAPE[0], 0
    for side, outputs in zip(SIDES, channels, strict=True):
        total += 2 * 9 * side**2 * ((2 * outputs + num_new) * inputs + outputs * new_before)
        inputs, new_before = outputs, num_new
    return total + 2 * NUM_CLASSES * (inputs + new_before)


@pytest.mark.parametrize("channels", [CHANNELS, [4, 5] * 8])
def test_a_growth_step_costs_two_forward_and_backward_passes_of_all_candidates(channels):
    found = growth_flops(network_of(channels), CHANNELS, 0.25, 30, SHAPE)
    assert found == 2 * 3 * 30 * candidate_forward_flops(channels, FEWEST_NEW)
    assert found > 2 * 30 * count_flops(network_of(channels), SHAPE).train


def test_a_last_image_alone_is_looked_at_with_the_batch_before():
    images, labels = (torch.from_numpy(array) for array in make_images(17, 1, SHAPE))
    grown, _ = grow_on_images(network_of(CHANNELS), images / 255, labels, 8, CHANNELS, 0.5, seeded(2))
    assert sum(parameter.numel() for parameter in grown.parameters()) > sum(
        parameter.numel() for parameter in network_of(CHANNELS).parameters()
    )


def test_counting_leaves_the_network_and_what_grows_out_of_it_as_they_were():
    images, labels = (torch.from_numpy(array) for array in make_images(20, 1, SHAPE))
    network = network_of(CHANNELS)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    grown, flops = grow_on_images(network, images / 255, labels, 8, CHANNELS, 0.5, seeded(2))
    again, _ = grow_on_images(network, images / 255, labels, 8, CHANNELS, 0.5, seeded(2))
    assert flops == growth_flops(network, CHANNELS, 0.5, 20, SHAPE)
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in grown.state_dict().items())
    assert network.training and grown.training
