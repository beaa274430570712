"""Firefly: a VGG network becomes wider, where its gradients ask for it (Wu et al. 2020; paper v5, section 4, "FF").

One step, after section 2 of Wu et al.:

1. every channel of every layer may be split and every layer may get new channels: `CandidateVGG`;
2. all directions are tuned together on the images of the stage, the network itself left as it is;
3. a candidate's score is the change of the loss along its path, from the gradient at the middle of it. At its start
   the gradient of a split is 0, as its two halves cancel each other: what it gains is of second order;
4. the best candidates over all layers are kept, until the asked number of parameters is added (`select_candidates`),
   or of neurons, as in the paper's released code (`select_neurons`).

Wu et al. also try new layers. That is left out here: the architecture keeps its sixteen convolutions.
"""

import math
from typing import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.firefly_selection import (
    LayerScores,
    num_chain_parameters,
    select_candidates,
    select_neurons,
)
from fairseq_alma.images.firefly_candidates import CandidateVGG, Steps, outer_sizes, unit_length, widen_vgg
from fairseq_alma.images.image_network import count_flops
from fairseq_alma.images.networks import VGG
from fairseq_alma.images.stage_images import batch_sizes

DEFAULT_STEPS = Steps()
TUNING_RATE = 0.1
FEWEST_NEW = 4  # candidates for a layer's new channels, however narrow it is
NUM_PASSES = 2  # forward and backward of the candidates over the images: one tunes directions, one scores

Batches = Iterable[tuple[Tensor, Tensor]]


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: Sequence[int],
    share: float,
    generator: Generator,
    steps: Steps = DEFAULT_STEPS,
    share_of: str = "parameters",
) -> VGG:
    """Return a wider network that computes nearly the same.

    Args:
        network: of `ConvBlock`s and one member, trained; stays as it is.
        batches: images, (B, C, H, W) or (1, B, C, H, W), normalised, and their labels, (B) or (1, B) int64, on the
            network's device. They are gone through twice, so a list will do and a generator will not.
        first_channels: of each convolution, before any growth.
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
    if share_of == "neurons":
        growth = select_neurons(scores, round(num_added))
    else:
        growth = select_candidates(scores, image_channels, num_classes, num_added)
    if not any(layer.split or layer.new for layer in growth):
        raise _too_small(share, num_added)
    return widen_vgg(network, candidates, growth)


def amount_to_add(
    image_channels: int, first_channels: Sequence[int], num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return how many parameters or neurons a share is.

    Args:
        image_channels: C.
        first_channels: see `grow_firefly`.
        num_classes: K.
        share: see `grow_firefly`.
        share_of: see `grow_firefly`.

    Raises:
        AlmaError: the share is not above 0, or too small for any channel of the network before its growth.
    """
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: a number above 0 is needed; the paper: 0.25")
    if share_of == "neurons":
        num_neurons = share * sum(first_channels)
        if round(num_neurons) < 1:
            raise AlmaError(
                f"--grow-share {share}: less than one of {sum(first_channels)} neurons; give a larger share"
            )
        return num_neurons
    first_size = num_chain_parameters(image_channels, first_channels, num_classes)
    wider = ([size + (layer == one) for layer, size in enumerate(first_channels)] for one in range(len(first_channels)))
    smallest = min(num_chain_parameters(image_channels, each, num_classes) for each in wider) - first_size
    if smallest > 2 * share * first_size:  # nothing would be nearer to what is asked
        raise _too_small(share, share * first_size)
    return share * first_size


def candidates_of(
    network: VGG, first_channels: Sequence[int], share: float, generator: Generator, steps: Steps = DEFAULT_STEPS
) -> CandidateVGG:
    """Return the network with all candidates of one step; see `grow_firefly`."""
    num_new = [max(FEWEST_NEW, math.ceil(share * channels)) for channels in first_channels]
    return CandidateVGG(network, num_new, steps, generator)


def tune_directions(candidates: CandidateVGG, batches: Batches, rate: float = TUNING_RATE) -> None:
    """Turn every direction a little against its gradient, once for each batch.

    Directions stay of length 1 and gradients are scaled to length 1, so that the rate means the same for all of them.

    Args:
        candidates: change in place.
        batches: see `grow_firefly`.
        rate: length of an update.
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
        gradients = torch.autograd.grad(_loss(candidates, images, labels), paths)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * labels.numel()
        num_images += labels.numel()
    if not num_images:
        raise ValueError("no images to score candidates with; batches must be something that one can go through twice")
    scores = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the network's loss is not a number, so it cannot grow; train with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]


def _loss(candidates: CandidateVGG, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(candidates(images)[0], labels.flatten())


def _too_small(share: float, num_added: float) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} parameters to add, less than one channel has; give a larger share; the "
        "paper: 0.25"
    )


def grow_on_images(
    network: VGG,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    first_channels: Sequence[int],
    share: float,
    generator: Generator,
    share_of: str = "parameters",
) -> tuple[VGG, int]:
    """Return a wider network, and the operations that growing it took.

    Args:
        network: of one member; stays as it is.
        images: (B, C, H, W), normalised.
        labels: (B) int64.
        batch_size: images of a pass at a time.
        first_channels: of each convolution, before any growth.
        share: of what is there before any growth, to be added.
        generator: see `grow_firefly`.
        share_of: see `grow_firefly`.
    """
    flops = growth_flops(network, first_channels, share, len(images), images.shape[1:])
    sizes = batch_sizes(len(images), batch_size)
    batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    return grow_firefly(network, batches, first_channels, share, generator, share_of=share_of), flops


def growth_flops(
    network: VGG, first_channels: Sequence[int], share: float, num_images: int, image_shape: Sequence[int]
) -> int:
    """Count the operations of one growth step: it goes over its images as training does, with all candidates.

    Each pass is a forward and a backward pass of the network with its candidates, counted as `NetworkFlops.train` is.
    What growing a mixture looks at, the validation loss, counts as little as other validation.

    Args:
        network: before the step.
        first_channels: of each convolution, before any growth.
        share: parameters to add, as a part of those before any growth.
        num_images: that the step goes over.
        image_shape: (C, H, W).
    """
    candidates = candidates_of(network, first_channels, share, torch.Generator().manual_seed(0))
    return NUM_PASSES * num_images * count_flops(candidates, image_shape).train
