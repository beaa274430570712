import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.firefly import (
    FEWEST_NEW,
    CandidateVGG,
    KeptCandidates,
    grow_firefly,
    keep_candidates,
    score_candidates,
    tune_directions,
    vgg_size,
)
from fairseq_alma.images.image_models import AlmaFireflyVGG, AlmaFireflyVGGConfig, GrownLayers
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, ImageKind, count_flops
from tests.images.image_streams import make_images

SHAPE, CHANNELS = (3, 16, 16), 4
SIDES = [16] * 2 + [8] * 2 + [4] * 4 + [2] * 4 + [1] * 4
FIRST = [CHANNELS] * NUM_CONVOLUTIONS
FIRST_SIZE = vgg_size(3, FIRST, 10)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def batches_of(num_batches=2, seed=0, dtype=torch.float32):
    """Return batches of noise; the mean color of an image depends on its class."""
    generator = seeded(seed)
    labels = torch.randint(10, (num_batches, 24), generator=generator)
    images = torch.randn(num_batches, 24, *SHAPE, generator=generator)
    colours = torch.randn(10, 3, 1, 1, generator=seeded(99))
    return list(zip((images + colours[labels]).to(dtype), labels, strict=True))


def trained_network(dtype=torch.float32, channels=FIRST, updates=8):
    """Return a network after a few updates, so that all channels and statistics differ."""
    network = VGG(SHAPE, 10, channels)
    network.reset_parameters([seeded(1)])
    network.to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches_of(updates, dtype=dtype):
        optimizer.zero_grad()
        F.cross_entropy(network(images)[0], labels).backward()
        optimizer.step()
    return network


def grown(network, seed=3, share=0.25, batches=None):
    return grow_firefly(network, batches or batches_of(), CHANNELS, share, seeded(seed))[0]


def test_a_share_of_neurons_adds_as_many_at_each_step(network):
    """64 neurons and a quarter of them: 16 more, then 16 more, as in the paper's released code."""
    for num_neurons in (80, 96):
        network, _ = grow_firefly(network, batches_of(), CHANNELS, 0.25, seeded(3), share_of="neurons")
        assert sum(channels_of(network)) == num_neurons
    with pytest.raises(AlmaError, match=r"--grow-share 0\.001: 0 neurons are too few to add one channel"):
        grow_firefly(network, batches_of(), CHANNELS, 0.001, seeded(3), share_of="neurons")


def num_params(network):
    return sum(parameter.numel() for parameter in network.parameters())


def channels_of(network):
    return [block.conv.weight.size(1) for block in network.blocks]


def mean_loss(network, batches, training):
    network = copy.deepcopy(network).train(training)
    with torch.no_grad():
        return sum(F.cross_entropy(network(images)[0], labels).item() for images, labels in batches) / len(batches)


@pytest.fixture(scope="module")
def network():
    return trained_network()


@pytest.fixture(scope="module")
def exact_network():
    return trained_network(torch.float64)


@pytest.mark.parametrize("training", [False, True])
def test_splits_whose_halves_are_equal_change_no_output(exact_network, training):
    candidates = CandidateVGG(exact_network, [1] * NUM_CONVOLUTIONS, seeded(0), split_step=0.0)
    splits = [KeptCandidates([0, 3] if layer % 3 else [1, 2, 3], []) for layer in range(NUM_CONVOLUTIONS)]
    wide = keep_candidates(exact_network, candidates, splits)
    assert channels_of(wide) == [7 - (layer % 3 > 0) for layer in range(NUM_CONVOLUTIONS)]
    (images, _), *_ = batches_of(1, seed=5, dtype=torch.float64)
    outputs = [copy.deepcopy(each).train(training)(images) for each in (exact_network, wide)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("position", [0.0, 1.0])
def test_the_paths_lead_from_the_network_to_the_network_with_all_candidates(exact_network, position):
    candidates = CandidateVGG(exact_network, [2, 3] * 8, seeded(0))
    for layer in candidates.blocks:
        layer.set_path(position)
    everything = [KeptCandidates([0, 1, 2, 3], list(range(num_new))) for num_new in [2, 3] * 8]
    end = keep_candidates(exact_network, candidates, everything) if position else copy.deepcopy(exact_network)
    (images, _), *_ = batches_of(1, seed=5, dtype=torch.float64)
    torch.testing.assert_close(candidates(images), end.train()(images), rtol=0, atol=1e-10)


def test_the_sum_of_scores_is_the_change_of_the_loss_by_all_candidates(exact_network):
    batches = batches_of(dtype=torch.float64)
    candidates = CandidateVGG(exact_network, [2] * NUM_CONVOLUTIONS, seeded(0), 0.01, 0.001)
    tune_directions(candidates, batches * 4)  # otherwise gains and losses cancel to rounding errors
    scores = score_candidates(candidates, batches)
    wide = keep_candidates(exact_network, candidates, [KeptCandidates([0, 1, 2, 3], [0, 1])] * NUM_CONVOLUTIONS)
    change = mean_loss(wide, batches, training=True) - mean_loss(exact_network, batches, training=True)
    assert sum(sum(layer.split) + sum(layer.new) for layer in scores) == pytest.approx(change, rel=0.05)


def test_tuned_directions_score_better_than_random_ones_and_keep_their_length(network):
    batches = batches_of(1) * 8
    candidates = CandidateVGG(network, [1] * NUM_CONVOLUTIONS, seeded(0), 0.05, 0.01)
    first = score_candidates(candidates, batches)
    tune_directions(candidates, batches)
    tuned = score_candidates(candidates, batches)
    for kind in (0, 1):
        assert sum(sum(layer[kind]) for layer in tuned) < min(0, sum(sum(layer[kind]) for layer in first))
    for layer in candidates.blocks:
        torch.testing.assert_close(layer.split.flatten(1).norm(dim=1), torch.ones(4))


def test_every_step_adds_the_share_of_the_first_size_so_that_growth_is_linear(network):
    sizes = [num_params(network)]
    for step in range(2):
        network = grown(network, seed=step)
        sizes.append(num_params(network))
        largest_channel = 18 * max(channels_of(network)) + 12
        assert sizes[-1] == vgg_size(3, channels_of(network), 10)
        assert abs(sizes[-1] - sizes[-2] - 0.25 * FIRST_SIZE) <= largest_channel / 2
    assert all(before < after for before, after in pairwise(sizes))
    assert sizes[-1] == pytest.approx(1.5 * FIRST_SIZE, rel=0.1)


def test_gradients_reach_all_channels_and_differ_between_the_halves_of_a_split(network):
    candidates = CandidateVGG(network, [2] * NUM_CONVOLUTIONS, seeded(0))
    wide = keep_candidates(network, candidates, [KeptCandidates([1], [0, 1])] * NUM_CONVOLUTIONS).train()
    images, labels = batches_of(1)[0]
    F.cross_entropy(wide(images)[0], labels).backward()
    for number, block in enumerate(wide.blocks):
        gradient = block.conv.weight.grad[0]  # (7, 7 or 3, 3, 3): four old channels, a second half, two new ones
        assert (gradient.flatten(2).abs().sum(dim=2) > 0).all(), number
        assert not torch.allclose(gradient[1], gradient[4], rtol=1e-4, atol=0)
        assert not torch.equal(block.conv.weight[0, 1], block.conv.weight[0, 4])
    assert (wide.classifier.weight.grad != 0).all()


def test_halves_copy_the_batch_norm_of_the_channel_and_new_channels_have_measured_statistics(network):
    batches = batches_of()
    candidates = CandidateVGG(network, [2] * NUM_CONVOLUTIONS, seeded(0))
    score_candidates(candidates, batches)
    wide = keep_candidates(network, candidates, [KeptCandidates([1, 2], [1])] * NUM_CONVOLUTIONS)
    for old, new in zip(network.blocks, wide.blocks, strict=True):
        for name, values in old.norm.state_dict().items():
            assert torch.equal(new.norm.state_dict()[name][0, :6], values[0, [0, 1, 2, 3, 1, 2]])
    block = wide.blocks[0]
    responses = [F.conv2d(images, block.conv.weight[0, 6:], padding=1) for images, _ in batches]
    mean = torch.stack([response.mean() for response in responses]).mean()
    variance = torch.stack([response.var() for response in responses]).mean()
    torch.testing.assert_close(block.norm.running_mean[0, 6], mean)
    torch.testing.assert_close(block.norm.running_var[0, 6], variance)


@pytest.mark.parametrize("share", [0, 1e-4])
def test_a_share_that_adds_nothing_is_refused_in_one_line(network, share):
    with pytest.raises(AlmaError, match="one channel") as error:
        grown(network, share=share)
    assert f"share {share}" in str(error.value) and "\n" not in str(error.value)


def test_a_network_that_has_diverged_is_refused(network):
    broken = copy.deepcopy(network)
    broken.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(AlmaError, match="NaN or infinite"):
        grown(broken)


@pytest.mark.gpu
def test_a_network_on_a_gpu_grows_there(network):
    device = torch.device("cuda")
    batches = [(images.to(device), labels.to(device)) for images, labels in batches_of()]
    wide, _ = grow_firefly(copy.deepcopy(network).to(device), batches, CHANNELS, 0.25, seeded(3))
    assert all(tensor.is_cuda for tensor in wide.state_dict().values())
    assert num_params(wide) == pytest.approx(1.25 * FIRST_SIZE, rel=0.03)


def candidate_forward_flops(channels, num_new):
    """Return 2 FLOPs for each weight and pixel: channels, splits, new channels, and weights for new inputs."""
    total, inputs, new_before = 0, SHAPE[0], 0
    for side, outputs in zip(SIDES, channels, strict=True):
        total += 2 * 9 * side**2 * ((2 * outputs + num_new) * inputs + outputs * new_before)
        inputs, new_before = outputs, num_new
    return total + 2 * 10 * (inputs + new_before)


def test_growth_depends_on_its_generator_and_does_not_change_the_network():
    images, labels = (torch.from_numpy(array) for array in make_images(17, 1, SHAPE))
    channels = [4, 5] * 8
    network = trained_network(channels=channels, updates=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    how = network, list(zip((images / 255).split((8, 9)), labels.split((8, 9)), strict=True)), CHANNELS, 0.5
    (grown, flops), (again, _), (other, _) = (grow_firefly(*how, seeded(seed)) for seed in (2, 2, 3))
    assert flops == 2 * 3 * 17 * candidate_forward_flops(channels, FEWEST_NEW)  # two forward and backward passes
    assert flops > 2 * 17 * count_flops(copy.deepcopy(network), SHAPE).train
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in grown.state_dict().items())
    assert network.training and grown.training
    assert channels_of(other) != channels_of(grown) or not torch.equal(other.classifier.weight, grown.classifier.weight)


def test_a_grown_network_is_built_again_from_its_options(network):
    wide = grown(network, share=1.0).eval()
    options = GrownLayers(channels=wide.channels).options()
    config = AlmaFireflyVGGConfig(channels=CHANNELS, **options)
    again = AlmaFireflyVGG.build_members(config, ImageKind(SHAPE, 10), 1).eval()
    assert options != {"layer_channels": ",".join(["4"] * 16)}
    again.load_state_dict(wide.state_dict())
    images, _ = batches_of(1)[0]
    assert torch.equal(again(images), wide(images))
