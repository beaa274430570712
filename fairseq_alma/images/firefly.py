"""Firefly: a VGG network grows where its gradients ask for it (Wu et al. 2020).

One step, after section 2 of Wu et al.:

1. every channel of every layer may be split and every layer may get new channels: `CandidateVGG`. A *split* makes a
   channel two, with incoming weights w + d and w - d and half of the outgoing weights each; a *new* channel has
   incoming weights of its own and small outgoing ones. All candidates are there at once, which costs about three times
   the network alone: the two halves of a split have the same outgoing weights, so that a layer may take their mean for
   both. A factor for each candidate, its *path*, leads from the network as it is, 0, to the candidate, 1;
2. all directions are tuned together on the images of the stage, the network itself left as it is;
3. a candidate's score is the change of the loss along its path, from the gradient at the middle of it. At its start
   the gradient of a split is 0, as its two halves cancel each other: what it gains is of second order;
4. the best candidates over all layers are kept, until the asked number of parameters is added (`select_candidates`),
   or of neurons, as in the paper's released code. The channels of a grown layer are the old ones, then the second
   halves of those that were split, then the new ones.

Every step adds the same share of the *first* size, so that a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1; section 4 calls this learner FF).
"""

import math
from functools import partial
from typing import Callable, Iterable, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.candidate_vgg import (
    DEFAULT_STEPS,
    CandidateVGG,
    KeptCandidates,
    Steps,
    keep_candidates,
    outer_sizes,
    unit_length,
)
from fairseq_alma.images.image_batches import batch_sizes
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, count_flops


class LayerScores(NamedTuple):
    """The candidates of one layer, each with the change of the loss that it promises; lower is better.

    Attributes:
        split: of each channel of the layer, which may become two.
        new: of each new channel that the layer may get.
    """

    split: Sequence[float]
    new: Sequence[float]


def num_chain_parameters(image_channels: int, channels: Sequence[int], num_classes: int) -> int:
    """Return the number of parameters of a VGG network with so many output ``channels`` of each convolution."""
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


SizeOf = Callable[[Sequence[int]], int]
"""Returns the size of a chain of convolutions with these channels."""


def size_of_chain(share_of: str, image_channels: int, num_classes: int) -> SizeOf:
    """Return a function that counts ``parameters`` or ``neurons``."""
    if share_of == "neurons":
        return sum
    return partial(num_chain_parameters, image_channels, num_classes=num_classes)


def select_candidates(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: SizeOf, num_added: float
) -> list[KeptCandidates]:
    """Keep candidates in the order of their scores until the next channel would be further from the requested size.

    This is the "greedy selection" of Wu et al. 2020, whose limit is a number of neurons. ``num_added`` parameters or
    neurons are added, as nearly as whole channels allow; none if every candidate is more than twice as large.
    """
    kept: list[tuple[list[int], list[int]]] = [([], []) for _ in scores]
    size = size_of(channels)
    goal = size + num_added
    ranked = sorted(
        (score, layer, kind, index)
        for layer, of_layer in enumerate(scores)
        for kind, of_kind in enumerate(of_layer)
        for index, score in enumerate(of_kind)
    )
    for _, layer, kind, index in ranked:
        kept[layer][kind].append(index)
        next_size = size_of([old + len(split) + len(new) for old, (split, new) in zip(channels, kept, strict=True)])
        if next_size - goal > goal - size:
            kept[layer][kind].pop()
            break
        size = next_size
    return [KeptCandidates(sorted(split), sorted(new)) for split, new in kept]


TUNING_RATE = 0.1
FEWEST_NEW = 4  # candidates for a layer's new channels, however narrow it is
NUM_PASSES = 2  # forward and backward of the candidates over the images: one tunes directions, one scores

Batches = Iterable[tuple[Tensor, Tensor]]


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: int,
    share: float,
    generator: Generator,
    steps: Steps = DEFAULT_STEPS,
    share_of: str = "parameters",
) -> VGG:
    """Return a larger network that computes nearly the same.

    Args:
        network: of `ConvBlock`s and one member, trained; stays as it is.
        batches: images, (B, C, H, W) or (1, B, C, H, W), normalised, and their labels, (B) or (1, B) int64, on the
            network's device; iterated over twice, so not a generator.
        first_channels: of each of the sixteen convolutions, before any growth.
        share: parameters or neurons to add, as a part of those of the network before any growth; the paper: 0.25.
        generator: of the first directions, on the CPU.
        steps: how large candidates are.
        share_of: what ``share`` counts, ``parameters`` or ``neurons``.

    Returns:
        The grown network, on the same device, in the same mode. Its parameters are new ones: it needs a new optimizer.

    Raises:
        AlmaError: the share is not above 0 or less than a channel, or the network's loss is not a number.
    """
    (image_channels, *_), num_classes = outer_sizes(network)
    num_added = amount_to_add(image_channels, first_channels, num_classes, share, share_of)
    candidates = candidates_of(network, first_channels, share, generator, steps)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    channels = [len(block.weight) for block in candidates.layers()]
    size_of = size_of_chain(share_of, image_channels, num_classes)
    growth = select_candidates(scores, channels, size_of, num_added)
    if not any(kept.split or kept.new for kept in growth):
        raise _too_small(share, num_added, share_of)
    return keep_candidates(network, candidates, growth)


def amount_to_add(
    image_channels: int, first_channels: int, num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return how many parameters or neurons a share is, for images of C channels and K classes; see `grow_firefly`.

    Raises:
        AlmaError: the share is not above 0, or too small for any channel of the network before its growth.
    """
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: a number above 0 is needed; the paper: 0.25")
    first = [first_channels] * NUM_CONVOLUTIONS
    size_of = size_of_chain(share_of, image_channels, num_classes)
    first_size = size_of(first)
    num_added: float = share * first_size
    if share_of == "neurons":
        num_added = round(num_added)
    larger = [[size + (layer == one) for layer, size in enumerate(first)] for one in range(len(first))]
    if min(map(size_of, larger)) - first_size > 2 * num_added:  # nothing would be nearer to what is asked
        raise _too_small(share, num_added, share_of)
    return num_added


def candidates_of(
    network: VGG, first_channels: int, share: float, generator: Generator, steps: Steps = DEFAULT_STEPS
) -> CandidateVGG:
    """Return the network with all candidates of one step; see `grow_firefly`."""
    num_new = max(FEWEST_NEW, math.ceil(share * first_channels))
    return CandidateVGG(network, [num_new] * len(network.blocks), steps, generator)


def tune_directions(candidates: CandidateVGG, batches: Batches, rate: float = TUNING_RATE) -> None:
    """Turn every direction, in place, a little against its gradient, once for each batch.

    Directions stay of length 1 and gradients are scaled to length 1, so that the rate, the length of an update, means
    the same for all of them.
    """
    directions = [direction for direction in candidates.parameters() if len(direction)]
    for images, labels in batches:
        gradients = torch.autograd.grad(_loss(candidates, images, labels), directions)
        with torch.no_grad():
            for direction, gradient in zip(directions, gradients, strict=True):
                direction.copy_(unit_length(direction - rate * unit_length(gradient)))


def score_candidates(candidates: CandidateVGG, batches: Batches) -> list[LayerScores]:
    """Return by how much each candidate would change the loss, in nats.

    It is the gradient of the mean loss at the middle of all paths, taken together: exact where the loss is linear or
    quadratic along them. (Wu et al. take the mean of several such points.) In passing, the statistics of the new
    channels' batch norms are measured.

    Raises:
        AlmaError: the loss is not a number.
    """
    paths: list[Tensor] = []
    for layer in candidates.layers():
        layer.new_norm.reset_running_stats()
        paths += layer.set_path(0.5)
    totals, num_images = [torch.zeros_like(path) for path in paths], 0
    for images, labels in batches:
        gradients = torch.autograd.grad(_loss(candidates, images, labels), paths, materialize_grads=True)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * labels.numel()
        num_images += labels.numel()
    if not num_images:
        raise ValueError("no images to score candidates with; batches are iterated over twice, so give a list")
    scores: list[list[float]] = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the network's loss is not a number, so it cannot grow; train with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]


def _loss(candidates: CandidateVGG, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(candidates(images)[0], labels.flatten())


def _too_small(share: float, num_added: float, share_of: str) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} {share_of} to add, less than one channel has; give a larger share; "
        "the paper: 0.25"
    )


def grow_on_images(
    network: VGG,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    first_channels: int,
    share: float,
    generator: Generator,
    share_of: str = "parameters",
) -> tuple[VGG, int]:
    """Return a network grown on batches of normalised images, and the operations of that; see `grow_firefly`."""
    flops = growth_flops(network, first_channels, share, len(images), images.shape[1:])
    sizes = batch_sizes(len(images), batch_size)
    batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    return grow_firefly(network, batches, first_channels, share, generator, share_of=share_of), flops


def growth_flops(network: VGG, first_channels: int, share: float, num_images: int, image_shape: Sequence[int]) -> int:
    """Count the operations of one growth step: its passes over the images with all candidates, forward and backward.

    Growing a mixture only needs the validation loss, which does not count as training.
    """
    candidates = candidates_of(network, first_channels, share, torch.Generator().manual_seed(0))
    return NUM_PASSES * num_images * count_flops(candidates, image_shape).train
