"""Firefly's growth step on the images of a stage, and what it costs; the step itself is `modules.firefly`."""

from typing import Sequence

import torch
from torch import Generator, Tensor

from fairseq_alma.images.firefly import NUM_PASSES, candidates_of, grow_firefly
from fairseq_alma.images.network_flops import count_flops
from fairseq_alma.images.stage_images import batch_sizes
from fairseq_alma.images.vgg import VGG


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
