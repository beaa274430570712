"""VGG19 with the same number of channels in every layer and batch norm (paper v5, Appendix B.1.2).

The paper says that it is the reduced VGG of Wu et al. 2020 (Firefly), and no more. Here: sixteen 3 by 3 convolutions in
five groups, a max pooling after each of the first four, the mean over what is left of the image, one linear layer, and
VGG's own initial weights (fan-out, He et al. 2015). The paper's released code has a fifth max pooling
instead of the mean, and torch's default initial weights: a `Variant`.

Letters: N members, B images, C channels of an image, H and W its height and width, O channels of a layer, K classes.
"""

from typing import Callable, NamedTuple, Optional, Sequence

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.member_layers import MemberBatchNorm2d, MemberConv2d, MemberLinear

VGG19 = (2, 2, 4, 4, 4)  # convolutions of each group
NUM_CONVOLUTIONS = sum(VGG19)
SMALLEST_IMAGE = 2 ** (len(VGG19) - 1)
MakeBlock = Callable[[int, int, int], nn.Module]
LAST_POOLS = ("mean", "max")
_POOL_AFTER = {sum(VGG19[: group + 1]) - 1 for group in range(len(VGG19) - 1)}


class Variant(NamedTuple):
    """Which VGG network.

    Attributes:
        last_pool: what follows the last convolution: the ``mean`` over the image; ``max``: a fifth max pooling, then
            the mean over what is left, which of 32 by 32 pixels is one.
        initial_weights: of convolutions, see `MemberConv2d`.
    """

    last_pool: str = "mean"
    initial_weights: str = "he"


USUAL = Variant()


class ConvBlock(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = MemberConv2d(num_members, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(num_members, out_channels)

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map (B, N I, H, W) to (B, N O, H, W)."""
        return F.relu(self.norm(self.conv(x)))


class VGG(ImageNetwork):
    """Convolutional blocks, pooling between them, one linear layer.

    Args:
        image_shape: (C, H, W); height and width of at least 16, with five max poolings of 32.
        num_classes: K.
        channels: O of each of the sixteen convolutions.
        num_members: N.
        make_block: builds the block of a convolution from its number and its I and O; None: a `ConvBlock`.
        variant: which VGG network.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        num_members: int = 1,
        make_block: Optional[MakeBlock] = None,
        variant: Variant = USUAL,
    ) -> None:
        super().__init__(num_members)
        self.variant = variant
        assert len(channels) == NUM_CONVOLUTIONS
        make_block = make_block or (lambda layer, before, after: ConvBlock(num_members, before, after))
        self.blocks = nn.ModuleList(
            make_block(layer, before, after)
            for layer, (before, after) in enumerate(zip([image_shape[0], *channels[:-1]], channels, strict=True))
        )
        self.classifier = MemberLinear(num_members, channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, MemberConv2d):
                module.initial_weights = variant.initial_weights

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        x = images.transpose(0, 1).flatten(1, 2) if images.dim() == 5 else images  # (B, N C, H, W) or (B, C, H, W)
        for layer, block in enumerate(self.blocks):
            x = block(x, generators)
            if layer in _POOL_AFTER:
                x = F.max_pool2d(x, 2)
        if self.variant.last_pool == "max":
            x = F.max_pool2d(x, 2)
        features = x.mean(dim=(2, 3)).unflatten(1, (self.num_members, -1))  # (B, N, O)
        return self.classifier(features.transpose(0, 1))
