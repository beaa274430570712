"""The networks of the image study: fully connected, and VGG19 (paper v5, section 5 and Appendices B.1.1 and B.1.2).

Their layers hold N models side by side: each has weights of its own, all are computed in one operation. What a member
computes here is what it computes alone, to rounding; members never exchange anything. A single model is the case N = 1,
so that models and stacks of models are the same code.

Of VGG the paper says that it is the reduced one of Wu et al. 2020 (Firefly), and no more. Here: sixteen 3 by 3
convolutions in five groups, all of the same number of channels, with batch norm, a max pooling after each of the first
four groups, the mean over what is left of the image, one linear layer, and VGG's own initial weights (fan-out, He et
al. 2015). The paper's released code has a fifth max pooling instead of the mean, and torch's default initial weights: a
`Variant`.

Letters: N members, B images, I input and O output features or channels, C channels of an image, H and W height and
width, K classes.
"""

import itertools
import math
from typing import Callable, NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.moe.gate import draw_as_linear

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1


class MemberLinear(nn.Module):
    """A linear map for each member.

    Args:
        num_members: N.
        in_features: I.
        out_features: O.
    """

    def __init__(self, num_members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_members, out_features))

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights as ``torch.nn.Linear`` does, those of each member from a generator of its own."""
        for weight, bias, generator in zip(self.weight, self.bias, generators, strict=True):
            draw_as_linear(weight, bias, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, B, I), or (B, I) that all members share, to (N, B, O)."""
        num_members, out_features, _ = self.weight.shape
        if num_members == 1:
            return F.linear(x if x.dim() == 2 else x.squeeze(0), self.weight.squeeze(0), self.bias.squeeze(0))[None]
        if x.dim() == 2:
            out = F.linear(x, self.weight.flatten(0, 1), self.bias.flatten())
            return out.view(x.size(0), num_members, out_features).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


class MemberConv2d(nn.Module):
    """A 3 by 3 convolution with padding 1 and no bias for each member; members' channels lie behind each other.

    Args:
        num_members: N.
        in_channels: I.
        out_channels: O.
    """

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.initial_weights = "he"
        self.weight = nn.Parameter(torch.empty(num_members, out_channels, in_channels, 3, 3))

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights; ``initial_weights`` says how.

        ``he``: from a normal distribution of variance 2 / (9 O), as VGG does (He et al. 2015); ``default``: as
        ``torch.nn.Conv2d`` does, uniform in ±1 / sqrt(9 I).
        """
        for weight, generator in zip(self.weight, generators, strict=True):
            if self.initial_weights == "he":
                nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu", generator=generator)
            else:
                bound = 1 / math.sqrt(weight[0].numel())
                nn.init.uniform_(weight, -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N I, H, W), or (B, I, H, W) that all members share, to (B, N O, H, W)."""
        num_members, _, in_channels = self.weight.shape[:3]
        groups = x.size(1) // in_channels
        assert groups in (1, num_members)
        return F.conv2d(x, self.weight.flatten(0, 1), padding=1, groups=groups)


class MemberBatchNorm2d(nn.Module):
    """Batch normalisation of each member's channels, as ``torch.nn.BatchNorm2d``.

    Args:
        num_members: N.
        num_channels: O.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_members: int, num_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_members, num_channels))
        self.bias = nn.Parameter(torch.zeros(num_members, num_channels))
        self.register_buffer("running_mean", torch.zeros(num_members, num_channels))
        self.register_buffer("running_var", torch.ones(num_members, num_channels))
        self.momentum = BATCH_NORM_MOMENTUM

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, N O, H, W)."""
        return F.batch_norm(
            x,
            self.running_mean.view(-1),
            self.running_var.view(-1),
            self.weight.view(-1),
            self.bias.view(-1),
            training=self.training,
            momentum=self.momentum,
            eps=BATCH_NORM_EPS,
        )


class MLP(ImageNetwork):
    """Fully connected layers.

    Args:
        image_shape: (C, H, W).
        num_classes: K.
        width: neurons of each hidden layer.
        num_hidden: hidden layers.
        num_members: N.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, num_hidden: int = 2, num_members: int = 1
    ) -> None:
        super().__init__(num_members)
        sizes = [math.prod(image_shape)] + [width] * num_hidden + [num_classes]
        self.layers = nn.ModuleList(
            MemberLinear(num_members, before, after) for before, after in itertools.pairwise(sizes)
        )

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        *hidden, last = self.layers
        x = images.flatten(-3)
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


VGG19 = (2, 2, 4, 4, 4)  # convolutions of each group
NUM_CONVOLUTIONS = sum(VGG19)
SMALLEST_IMAGE = 2 ** (len(VGG19) - 1)
MakeBlock = Callable[[int, int, int], nn.Module]
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
