"""Image networks with mixtures of experts, and their growth (paper v5, section 5).

The hidden layers of the fully connected network, or the sixteen convolutions of the VGG network, are mixtures. Such a
network has one member, because members with different gate trees cannot be stacked.

A growth step (Appendix A, Algorithm 2) selects the expert with the largest validation loss in each layer. The method
``split`` replaces this expert by two equal experts below a new random gate node; the loss does not change. The method
``copy`` copies the expert and the expert's row of a flat gate (paper v1, section 5.2); the loss changes.

Letters in shapes: B images, E experts, I input features or channels, O output features or channels, H height, W width,
K classes.
"""

import itertools
import math
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    ImageNetwork,
    MemberBatchNorm2d,
    MemberConv2d,
    MemberLinear,
    in_chunks,
)
from fairseq_alma.moe.dispatch import ExpertLosses
from fairseq_alma.moe.mixture_layer import MixtureLayer


class MixtureLinear(MixtureLayer):
    """Mixture of experts that maps (B, I) to (B, O). Each expert is a linear layer with ReLU."""

    def __init__(self, in_features: int, out_features: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_features, tree, gate)
        self.linear = MemberLinear(tree.num_experts, in_features, out_features)

    def all_experts(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.linear.weight.flatten(0, 1), self.linear.bias.flatten())
        return F.relu(out).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        return F.relu(F.linear(x, self.linear.weight[expert], self.linear.bias[expert]))

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        return torch.bmm(combine_weights[:, None], outputs)[:, 0]


class MixtureConv(MixtureLayer):
    """Mixture of experts that maps (B, I, H, W) to (B, O, H, W). Each expert has a convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_channels, tree, gate)
        self.conv = MemberConv2d(tree.num_experts, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(tree.num_experts, out_channels)

    def all_experts(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        norm = self.norm
        out = F.conv2d(x, self.conv.weight[expert], padding=1)
        scale = norm.weight[expert] * (norm.running_var[expert] + BATCH_NORM_EPS).rsqrt()
        shift = norm.bias[expert] - norm.running_mean[expert] * scale
        return F.relu(out * scale[:, None, None] + shift[:, None, None])

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        return torch.einsum("be,beohw->bohw", combine_weights, outputs)


class MixtureMLP(ImageNetwork):
    """Fully connected network. Each gate tree defines a hidden layer: a mixture of experts of ``width`` neurons."""

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(num_members=1)
        sizes = itertools.pairwise([math.prod(image_shape)] + [width] * len(trees))
        self.blocks = nn.ModuleList(
            MixtureLinear(before, after, tree, gate) for (before, after), tree in zip(sizes, trees, strict=True)
        )
        self.classifier = MemberLinear(1, width, num_classes)

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        x = images.flatten(-3).flatten(0, -2)  # (B, I) from (B, C, H, W) or (1, B, C, H, W)
        for block in self.blocks:
            x = block(x, generators)
        return self.classifier(x)


def mixture_layers(network: nn.Module) -> list[MixtureLayer]:
    """Return the mixture layers of a network, from input to output."""
    return [module for module in network.modules() if isinstance(module, MixtureLayer)]


@torch.no_grad()
def measure_expert_losses(network: ImageNetwork, images: Tensor, labels: Tensor) -> ExpertLosses:
    """Return the loss of each expert in each layer, summed over the images that the gate assigns to the expert.

    Soft gates divide the loss of an image among the experts in proportion to the gate's probabilities. The function
    leaves the network in evaluation mode.
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
    """Split or copy the expert with the largest validation loss in each layer, in place. Return the expert indices."""
    losing = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels).losses]
    for layer, expert in zip(mixture_layers(network), losing, strict=True):
        layer.grow(expert, generator, method)
    return losing
