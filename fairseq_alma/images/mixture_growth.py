"""The growth step of a mixture with a tree of gates (paper v5, Appendix A, Algorithm 2), or with a flat one.

In each layer the expert that is responsible for the largest part of the validation loss becomes two equal ones under
a new random choice: the loss stays as it is. Or it is copied with its row of the gate, which stays flat (v1, section
5.2, ablations): the loss jumps.

Letters: B images, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.stage_training import in_chunks
from fairseq_alma.moe.expert_losses import ExpertLosses


@torch.no_grad()
def measure_expert_losses(network: ImageNetwork, images: Tensor, labels: Tensor) -> ExpertLosses:
    """Sum up the losses of the images that went through each expert.

    Args:
        network: a network with mixtures; left in evaluation mode.
        images: (B, C, H, W), normalised.
        labels: (B) int64.

    Returns:
        Sums for each layer: with soft gates an image's loss is shared out by the experts' probabilities.
    """
    network.eval()
    sums = ExpertLosses()
    chunks = in_chunks(images)
    for some, classes in zip(chunks, labels.split([len(chunk) for chunk in chunks]), strict=True):
        losses = F.cross_entropy(network(some)[0], classes, reduction="none")
        sums.add_shared(losses, [layer.shares() for layer in mixture_layers(network)])
    return sums


def grow_losing_experts(
    network: ImageNetwork, images: Tensor, labels: Tensor, generator: Generator, method: str = "split"
) -> list[int]:
    """Make two of the losing expert of each layer, in place.

    Args:
        network: a network with mixtures.
        images: (B, C, H, W), normalised; of a validation set.
        labels: (B) int64.
        generator: of the new choices' weights.
        method: ``split`` or ``copy``, see `MixtureLayer.grow`.

    Returns:
        The expert that became two in each layer; of several with the same loss the first.
    """
    losing = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels).losses]
    for layer, expert in zip(mixture_layers(network), losing, strict=True):
        layer.grow(expert, generator, method)
    return losing
