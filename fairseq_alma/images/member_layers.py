"""Layers of N models side by side: each has weights of its own, all are computed in one operation.

What a member computes here is what it computes alone, to rounding; members never exchange anything. A single model is
the case N = 1, so that models and stacks of models are the same code.

Letters: N members, B images, I input and O output features or channels, H and W height and width.
"""

import math
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.moe.initial_weights import draw_as_linear

INITIAL_WEIGHTS = ("he", "default")
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
