"""Floating-point operations of a network for one image, counted while it runs.

As in `metrics.flops`: only matrix products and convolutions count, a multiplication and an addition are two
operations, and a backward pass costs two forward passes.
"""

from dataclasses import dataclass
from typing import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.images.image_network import ImageNetwork


@dataclass(frozen=True)
class NetworkFlops:
    """Operations per image, over all members.

    Attributes:
        train: of a forward and a backward pass; with hard gates all experts are computed in training.
        test: of a forward pass; with hard gates one expert of each layer.
    """

    train: int
    test: int


def count_flops(network: ImageNetwork, image_shape: Sequence[int]) -> NetworkFlops:
    """Count the operations for one (C, H, W) image. Leaves buffers as they were, and evaluation mode."""
    device = next(network.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    # Two images and half the operations, as batch norm refuses to train on a single number.
    images = torch.zeros(2, *image_shape, device=device)
    counts = []
    for is_training in (True, False):
        network.train(is_training)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(images, [torch.Generator().manual_seed(0)])
        counts.append(counter.get_total_flops() // 2)
    for buffer, before in buffers:
        buffer.copy_(before)
    return NetworkFlops(train=3 * counts[0], test=counts[1])
