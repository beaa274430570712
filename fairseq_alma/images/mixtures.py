"""The networks of the image study with mixtures of experts in their layers, and how these grow (paper v5, section 5).

The two hidden layers of the fully connected network, or all sixteen convolutions of the VGG network, are mixtures. The
networks have one member: the trees of several members differ, so they cannot be stacked.

The growth step (Appendix A, Algorithm 2): in each layer the expert with the largest part of the validation loss is
split into two equal ones under a new random choice, and the loss is unchanged. Or it is copied with its row of a flat
gate (v1, section 5.2, ablations), and the loss changes.

Letters: B images, E experts, I input and O output features or channels, H and W height and width, K classes.
"""

import math
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    NUM_CONVOLUTIONS,
    USUAL,
    VGG,
    ImageNetwork,
    MemberBatchNorm2d,
    MemberConv2d,
    MemberLinear,
    Variant,
    in_chunks,
)
from fairseq_alma.moe.dispatch import ExpertLosses
from fairseq_alma.moe.mixture_layer import MixtureLayer


class MixtureLinear(MixtureLayer):
    """Experts are linear layers with ReLU; maps (B, I) to (B, O)."""

    def __init__(self, in_features: int, out_features: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_features, tree, gate)
        self.linear = MemberLinear(tree.num_experts, in_features, out_features)

    def gate_features(self, x: Tensor) -> Tensor:
        return x

    def expert_modules(self) -> list[nn.Module]:
        return [self.linear]

    def all_experts(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.linear.weight.flatten(0, 1), self.linear.bias.flatten())
        return F.relu(out).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        return F.relu(F.linear(x, self.linear.weight[expert], self.linear.bias[expert]))

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        return torch.bmm(combine_weights[:, None], outputs)[:, 0]


class MixtureConv(MixtureLayer):
    """Experts are convolution, batch norm and ReLU; maps (B, I, H, W) to (B, O, H, W).

    The gate sees the mean of each channel over the image.
    """

    def __init__(self, in_channels: int, out_channels: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_channels, tree, gate)
        self.conv = MemberConv2d(tree.num_experts, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(tree.num_experts, out_channels)

    def gate_features(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))

    def expert_modules(self) -> list[nn.Module]:
        return [self.conv, self.norm]

    def all_experts(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return (B, O, H, W), at test."""
        norm = self.norm
        out = F.conv2d(x, self.conv.weight[expert], padding=1)
        scale = norm.weight[expert] * (norm.running_var[expert] + BATCH_NORM_EPS).rsqrt()
        shift = norm.bias[expert] - norm.running_mean[expert] * scale
        return F.relu(out * scale[:, None, None] + shift[:, None, None])

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        return torch.einsum("be,beohw->bohw", combine_weights, outputs)


class MixtureMLP(ImageNetwork):
    """A fully connected network whose hidden layers are mixtures.

    Args:
        image_shape: (C, H, W).
        num_classes: K.
        width: neurons of each expert.
        trees: of each hidden layer.
        gate: ``soft`` or ``hard``.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(num_members=1)
        sizes = [math.prod(image_shape)] + [width] * len(trees)
        self.blocks = nn.ModuleList(
            MixtureLinear(before, after, tree, gate)
            for before, after, tree in zip(sizes[:-1], sizes[1:], trees, strict=True)
        )
        self.classifier = MemberLinear(1, width, num_classes)

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        x = _only_member(images).flatten(1)
        for block in self.blocks:
            x = block(x, generators)
        return self.classifier(x)


class MixtureVGG(VGG):
    """A VGG network whose convolutions are mixtures, each with a tree and as many channels an expert; see `VGG`."""

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        channels: int,
        trees: Sequence[GateTree],
        gate: str,
        variant: Variant = USUAL,
    ) -> None:
        super().__init__(
            image_shape,
            num_classes,
            [channels] * NUM_CONVOLUTIONS,
            make_block=lambda layer, before, after: MixtureConv(before, after, trees[layer], gate),
            variant=variant,
        )

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        return super().forward(_only_member(images), generators)


def mixture_layers(network: nn.Module) -> list[MixtureLayer]:
    """Return the mixtures of a network, in order."""
    return [module for module in network.modules() if isinstance(module, MixtureLayer)]


def _only_member(images: Tensor) -> Tensor:
    return images[0] if images.dim() == 5 else images


@torch.no_grad()
def measure_expert_losses(network: ImageNetwork, images: Tensor, labels: Tensor) -> ExpertLosses:
    """Sum the losses of the images of each expert, layer by layer, in evaluation mode.

    With soft gates an image's loss is divided among the experts by their probabilities.
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
    """Split or copy the expert with the largest validation loss of each layer, in place; see `MixtureLayer.grow`.

    Returns:
        That expert of each layer; of several with the same loss the first.
    """
    losing = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels).losses]
    for layer, expert in zip(mixture_layers(network), losing, strict=True):
        layer.grow(expert, generator, method)
    return losing
