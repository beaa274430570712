"""An average of the weights at the ends of stages, which predicts, while training goes on from the weights themselves.

What batch norm has measured belongs to the weights that it was measured with, so it is measured anew for averaged ones.
Source: Izmailov et al. 2018, Averaging Weights Leads to Wider Optima; here over stages rather than epochs.
"""

from fractions import Fraction
from typing import Iterable, Mapping, Optional

import torch
from torch import Tensor

from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.networks import MemberBatchNorm2d
from fairseq_alma.training.stage_ends import MEAN


def share_of_new(stage: int, how: str) -> float:
    """Return the share that the weights at the end of a stage have in the average: 1 after the first one.

    Args:
        stage: from 0.
        how: ``mean``, or the half-life as a share of the stages so far.
    """
    if stage == 0:
        return 1.0
    return 1 / (stage + 1) if how == MEAN else 1 - 2.0 ** float(-1 / (Fraction(how) * (stage + 1)))


@torch.no_grad()
def average_of(before: Optional[Mapping[str, Tensor]], now: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return the average with one more state in it, in fp32; None: there was none before."""
    if before is None:
        return {name: tensor.clone() for name, tensor in now.items()}
    return {name: before[name].to(tensor.device).lerp(tensor, share) for name, tensor in now.items()}


@torch.no_grad()
def measure_batch_norm(network: ImageNetwork, batches: Iterable[Tensor]) -> int:
    """Give each batch norm the mean over batches of what it measures in them.

    Args:
        network: its running means and variances are replaced; without any, it is left as it is.
        batches: of (B, C, H, W) normalised images.

    Returns:
        Images that went through the network.
    """
    norms = [module for module in network.modules() if isinstance(module, MemberBatchNorm2d)]
    if not norms:
        return 0
    usual, num_images = norms[0].momentum, 0
    network.train()
    for number, images in enumerate(batches, start=1):
        for norm in norms:
            norm.momentum = 1 / number
        network(images, [torch.Generator().manual_seed(number)])
        num_images += len(images)
    for norm in norms:
        norm.momentum = usual
    network.eval()
    return num_images
