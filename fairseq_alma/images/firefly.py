"""Firefly: grow a VGG network with the candidates that have the best gradient scores (Wu et al. 2020).

A growth step follows section 2 of Wu et al.:

1. Every channel of every layer may be split, and every layer may get new channels. A *split* replaces a channel with
   incoming weights w by two halves with incoming weights w + d and w - d. Each half has half of the outgoing weights,
   so the next layer takes the mean of the halves. A *new* channel has separate incoming weights and small outgoing
   weights. `CandidateVGG` is one network with all candidates; its compute is about three times the compute of the
   network without candidates. A factor moves each candidate along a *path*, from 0 (network without the candidate) to
   1 (network with the candidate).
2. `tune_directions` tunes the *directions* of all candidates (d and the weights of new channels, scaled to norm 1) on
   the images of the stage. The weights of the network do not change.
3. `score_candidates` estimates the change of the loss along each path from the gradient at the middle of the path. At
   the start of a path, the gradient of a split is 0, because the effects of the two halves cancel each other. The
   gain from a split is of second order.
4. `select_candidates` keeps the best candidates of all layers and adds about the requested number of parameters. The
   paper's released code counts neurons instead of parameters.

Each step adds the same share of the *initial* size, so a network grows linearly: "at every growth phase, we add
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
FEWEST_NEW = 4  # minimum number of new channels that are candidates in each layer
NUM_PASSES = 2  # passes (forward and backward) over the images: tune directions, compute scores
Batches = Sequence[tuple[Tensor, Tensor]]
SizeOf = Callable[[Sequence[int]], int]
"""Function that computes the size of a VGG network from the output channels of each convolution."""


class LayerScores(NamedTuple):
    """Scores of the candidates of one layer: scores of splits and scores of new channels. Lower is better."""

    split: Sequence[float]
    new: Sequence[float]


def vgg_size(image_channels: int, channels: Sequence[int], num_classes: int, share_of: str = "parameters") -> int:
    """Return the number of ``parameters`` or ``neurons`` of a VGG network with ``channels`` outputs in each layer."""
    if share_of == "neurons":
        return sum(channels)
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


def select_candidates(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: SizeOf, num_added: float
) -> list[KeptCandidates]:
    """Return the candidates to keep, for each layer ("greedy selection" in Wu et al. 2020).

    The function adds candidates from the lowest score on. It stops when the size is nearest to the current size plus
    ``num_added`` parameters or neurons.
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
    """Return a larger network with nearly the same output, and the FLOPs of the growth step.

    Args:
        network: trained network of `ConvBlock`s with one member; not modified.
        batches: normalized images (B, C, H, W) and int64 labels (B), on the device of the network.
        first_channels: output channels of each convolution before any growth.
        share: parameters or neurons to add, relative to the network before any growth; 0.25 in the paper.
        generator: random generator for the initial directions, on the CPU.
        share_of: unit of ``share``: ``parameters`` or ``neurons``.

    Returns:
        (grown network, on the device and in the mode of ``network``; FLOPs of the growth step). The parameters are new
        tensors, so the caller must build a new optimizer.

    Raises:
        AlmaError: the share is not a finite positive number, the share is too small to add a channel, or the loss of
            the network is NaN or infinite.
    """
    image_channels = network.image_shape[0]
    num_added = amount_to_add(image_channels, first_channels, network.num_classes, share, share_of)
    num_new = max(FEWEST_NEW, math.ceil(share * first_channels))
    candidates = CandidateVGG(network, [num_new] * NUM_CONVOLUTIONS, generator)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    size_of = partial(vgg_size, image_channels, num_classes=network.num_classes, share_of=share_of)
    growth = select_candidates(scores, network.channels, size_of, num_added)
    if not any(kept.split or kept.new for kept in growth):
        raise _too_small(share, num_added, share_of)
    num_images = sum(len(labels) for _, labels in batches)
    flops = NUM_PASSES * num_images * count_flops(candidates, batches[0][0].shape[1:]).train
    return keep_candidates(network, candidates, growth), flops


def amount_to_add(
    image_channels: int, first_channels: int, num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return the number of parameters or neurons to add. Raises AlmaError if the share is invalid or too small."""
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: expected a finite number above 0; the paper uses 0.25")
    first = [first_channels] * NUM_CONVOLUTIONS
    size_of = partial(vgg_size, image_channels, num_classes=num_classes, share_of=share_of)
    num_added: float = share * size_of(first)
    if share_of == "neurons":
        num_added = round(num_added)
    larger = [[size + (layer == one) for layer, size in enumerate(first)] for one in range(len(first))]
    if min(map(size_of, larger)) - size_of(first) > 2 * num_added:  # adding nothing is closer to the requested size
        raise _too_small(share, num_added, share_of)
    return num_added


def _too_small(share: float, num_added: float, share_of: str) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} {share_of} are too few to add one channel; give a larger share (the "
        "paper uses 0.25)"
    )


def tune_directions(candidates: CandidateVGG, batches: Batches, rate: float = TUNING_RATE) -> None:
    """Move the direction of every candidate against the gradient of the loss, in place, once for each batch.

    Each update scales the gradient to norm 1, subtracts ``rate`` times the scaled gradient from the direction, and
    scales the direction to norm 1.
    """
    directions = [direction for direction in candidates.parameters() if len(direction)]
    for images, labels in batches:
        gradients = torch.autograd.grad(F.cross_entropy(candidates(images)[0], labels), directions)
        with torch.no_grad():
            for direction, gradient in zip(directions, gradients, strict=True):
                direction.copy_(unit_length(direction - rate * unit_length(gradient)))


def score_candidates(candidates: CandidateVGG, batches: Batches) -> list[LayerScores]:
    """Return the score of each candidate: the estimated change of the loss in nats.

    A score is the derivative of the mean loss with respect to the position on the candidate's path, with all
    candidates at the middle of their paths. The score is exact if the loss is linear or quadratic along the paths. (Wu
    et al. average the gradient over several points.) The function also measures the batch norm statistics of new
    channels.

    Raises:
        AlmaError: a score is NaN or infinite.
    """
    paths: list[Tensor] = []
    for layer in candidates.blocks:
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
        raise AlmaError("growth: the loss of the network is NaN or infinite; start a new --run with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]
