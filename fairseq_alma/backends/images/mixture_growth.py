"""The growth step of a mixture with a tree of gates (paper v5, Appendix A, Algorithm 2).

In each layer the expert that is responsible for the largest part of the validation loss becomes two equal ones under
a new random choice. The loss stays as it is.

Letters: B images, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fairseq_alma.backends.images.stage_training import CHUNK
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.moe.image_mixtures import mixture_blocks


@torch.no_grad()
def expert_losses(network: ImageNetwork, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Sum up the losses of the images that went through each expert.

    Args:
        network: a network with mixtures; left in evaluation mode.
        images: (B, C, H, W), normalised.
        labels: (B) int64.

    Returns:
        For each layer (E) nats: with soft gates an image's loss is shared out by the experts' probabilities.
    """
    network.eval()
    totals: list[Tensor] = []
    for some, classes in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
        losses = F.cross_entropy(network(some)[0], classes, reduction="none")
        sums = [losses @ block.shares() for block in mixture_blocks(network)]
        totals = [before + now for before, now in zip(totals, sums, strict=True)] if totals else sums
    return totals


def split_losing_experts(network: ImageNetwork, images: Tensor, labels: Tensor, generator: Generator) -> list[int]:
    """Split the losing expert of each layer, in place.

    Args:
        network: a network with mixtures.
        images: (B, C, H, W), normalised; of a validation set.
        labels: (B) int64.
        generator: of the new choices' weights.

    Returns:
        The expert that was split in each layer; of several with the same loss the first.
    """
    losing = [int(losses.argmax()) for losses in expert_losses(network, images, labels)]
    for block, expert in zip(mixture_blocks(network), losing, strict=True):
        block.split(expert, generator)
    return losing
