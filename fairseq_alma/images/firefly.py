"""Firefly: grow a VGG network by the gradients of candidates (Wu et al. 2020).

One step, after section 2 of Wu et al.:

1. Every channel of every layer may be split, and every layer may get new channels: `CandidateVGG`. A *split* replaces a
   channel by two, with incoming weights w + d and w - d and half of the outgoing weights each. A *new* channel has its
   own incoming weights and small outgoing weights. All candidates are in one network, which costs about three times as
   much: both halves of a split have the same outgoing weights, so the next layer takes their mean. Each candidate has a
   factor, its *path*, from 0, the network without it, to 1.
2. All directions are tuned together on the images of the stage; the weights of the network stay unchanged.
3. The score of a candidate is the change of the loss along its path, from the gradient at the middle. At the start of a
   path the gradient of a split is 0, because its two halves cancel each other: its gain is of second order.
4. The best candidates over all layers are kept up to the requested number of parameters (`select_candidates`), or of
   neurons, as in the paper's released code.

Every step adds the same share of the *first* size, so a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1; section 4 calls this learner FF).
"""

import math
from functools import partial
from typing import Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.candidate_vgg import CandidateVGG, KeptCandidates, keep_candidates, unit_length
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, count_flops

TUNING_RATE = 0.1
FEWEST_NEW = 4  # candidates for new channels of a layer of any width
NUM_PASSES = 2  # forward and backward over the images: one tunes directions, one scores
Batches = Sequence[tuple[Tensor, Tensor]]
SizeOf = Callable[[Sequence[int]], int]
"""Returns the size of a VGG network with these channels."""


class LayerScores(NamedTuple):
    """Scores of the candidates of one layer, for each channel and each new channel; lower is better."""

    split: Sequence[float]
    new: Sequence[float]


def num_chain_parameters(image_channels: int, channels: Sequence[int], num_classes: int) -> int:
    """Return the number of parameters of a VGG network with these output ``channels`` of each convolution."""
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


def size_of_chain(share_of: str, image_channels: int, num_classes: int) -> SizeOf:
    """Return a function that counts ``parameters`` or ``neurons``."""
    if share_of == "neurons":
        return sum
    return partial(num_chain_parameters, image_channels, num_classes=num_classes)


def select_candidates(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: SizeOf, num_added: float
) -> list[KeptCandidates]:
    """Keep candidates in the order of their scores while the next one brings the size closer to the requested size.

    This is the "greedy selection" of Wu et al. 2020, with a limit of ``num_added`` parameters or neurons.
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


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: int,
    share: float,
    generator: Generator,
    share_of: str = "parameters",
) -> tuple[VGG, int]:
    """Return a larger network that computes nearly the same.

    Args:
        network: of `ConvBlock`s and one member, trained; stays unchanged.
        batches: normalized images, (B, C, H, W), and their labels, (B) int64, on the device of the network.
        first_channels: of each of the sixteen convolutions before any growth.
        share: parameters or neurons to add, relative to the network before any growth; the paper: 0.25.
        generator: draws the first directions; on the CPU.
        share_of: unit of ``share``: ``parameters`` or ``neurons``.

    Returns:
        The grown network, on the same device and in the same mode, and the FLOPs of the step. The parameters are new,
        so they need a new optimizer.

    Raises:
        AlmaError: the share is not above 0 or less than a channel, or the loss of the network is not a number.
    """
    image_channels = network.image_shape[0]
    num_added = amount_to_add(image_channels, first_channels, network.num_classes, share, share_of)
    num_new = max(FEWEST_NEW, math.ceil(share * first_channels))
    candidates = CandidateVGG(network, [num_new] * NUM_CONVOLUTIONS, generator)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    size_of = size_of_chain(share_of, image_channels, network.num_classes)
    growth = select_candidates(scores, network.channels, size_of, num_added)
    if not any(kept.split or kept.new for kept in growth):
        raise _too_small(share, num_added, share_of)
    num_images = sum(len(labels) for _, labels in batches)
    flops = NUM_PASSES * num_images * count_flops(candidates, batches[0][0].shape[1:]).train
    return keep_candidates(network, candidates, growth), flops


def amount_to_add(
    image_channels: int, first_channels: int, num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return the number of parameters or neurons in a share. Raises AlmaError if the share is too small."""
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: a number above 0 is needed; the paper uses 0.25")
    first = [first_channels] * NUM_CONVOLUTIONS
    size_of = size_of_chain(share_of, image_channels, num_classes)
    num_added: float = share * size_of(first)
    if share_of == "neurons":
        num_added = round(num_added)
    larger = [[size + (layer == one) for layer, size in enumerate(first)] for one in range(len(first))]
    if min(map(size_of, larger)) - size_of(first) > 2 * num_added:  # adding nothing is closer to the requested size
        raise _too_small(share, num_added, share_of)
    return num_added


def _too_small(share: float, num_added: float, share_of: str) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} {share_of} to add, less than one channel; give a larger share, the "
        "paper uses 0.25"
    )


def tune_directions(candidates: CandidateVGG, batches: Batches, rate: float = TUNING_RATE) -> None:
    """Move every direction against its gradient, in place, once for each batch.

    Directions and gradients are scaled to length 1, so the rate, the length of an update, is the same for all.
    """
    directions = [direction for direction in candidates.parameters() if len(direction)]
    for images, labels in batches:
        gradients = torch.autograd.grad(F.cross_entropy(candidates(images)[0], labels), directions)
        with torch.no_grad():
            for direction, gradient in zip(directions, gradients, strict=True):
                direction.copy_(unit_length(direction - rate * unit_length(gradient)))


def score_candidates(candidates: CandidateVGG, batches: Batches) -> list[LayerScores]:
    """Return the estimated change of the loss by each candidate, in nats.

    A score is the gradient of the mean loss at the middle of all paths together: exact if the loss is linear or
    quadratic along them. (Wu et al. take the mean of several such points.) Also measures the batch norm statistics of
    new channels.

    Raises:
        AlmaError: the loss is not a number.
    """
    paths: list[Tensor] = []
    for layer in candidates.layers():
        layer.new_norm.reset_running_stats()
        paths += layer.set_path(0.5)
    totals, num_images = [torch.zeros_like(path) for path in paths], 0
    for images, labels in batches:
        loss = F.cross_entropy(candidates(images)[0], labels)
        gradients = torch.autograd.grad(loss, paths, materialize_grads=True)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * len(labels)
        num_images += len(labels)
    scores: list[list[float]] = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the loss of the network is not a number; train with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]
