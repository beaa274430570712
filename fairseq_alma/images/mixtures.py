"""Mixtures of experts for images: layers, a fully connected network, and growth (paper v5, section 4.2, Appendix A).

With a ``soft`` gate, a layer returns the mean of the expert outputs, weighted by the gate's probabilities. With a
``hard`` gate, a layer returns the output of one expert for each image: in training, an expert sampled from the
probabilities, with the straight-through gradient (Bengio et al. 2013); in evaluation, the expert in `Routing.expert`.
Training computes all experts in one operation. Evaluation with a hard gate computes only the selected experts.

Each hidden layer (fully connected) or convolution (VGG) of a network is a mixture. Such a network has one member,
because members with different gate trees cannot be stacked. A growth step (Algorithm 2) selects the expert with the
largest validation loss in each layer. The method ``split`` replaces this expert by two equal experts below a new random
gate node; the loss does not change. The method ``copy`` copies the expert and the expert's row of a flat gate (paper
v1, section 5.2); the loss changes.

Letters: B images, I input features or channels, O output features or channels, E experts, H height, W width.
"""

import itertools
import math
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import gather_slices
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    ImageNetwork,
    MemberBatchNorm2d,
    MemberConv2d,
    MemberLinear,
    in_chunks,
)
from fairseq_alma.moe.gate import ExpertLosses, ParallelGate, Routing, init_as_linear


class MixtureLayer(nn.Module):
    """Mixture of experts with a gate tree; a subclass defines the experts.

    The gate's input is the layer input (B, I), or the channel means of a layer input (B, I, H, W).

    Args:
        in_features: I, number of input features of the gate.
        tree: gate tree.
        gate: ``soft`` or ``hard``.

    Attributes:
        routing: routing of the last batch, without gradient; see `shares`.
        gate_input: (B, I), input of the gate for the last batch.
    """

    def __init__(self, in_features: int, tree: GateTree, gate: str) -> None:
        super().__init__()
        self.gate = ParallelGate(in_features, tree)
        self.is_hard = gate == "hard"
        self.routing: Optional[Routing] = None
        self.gate_input: Optional[Tensor] = None

    @property
    def num_experts(self) -> int:
        return self.gate.tree.num_experts

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Return the layer output for a batch. In training, a hard gate samples experts; see `sample_experts`."""
        features = x.mean(dim=(2, 3)) if x.dim() == 4 else x
        routing = self.gate(features)
        self.routing = Routing(*(each.detach() for each in routing))
        self.gate_input = features.detach()
        if not self.is_hard:
            return self.combine(self.all_experts(x), routing.combine_weights)
        if self.training:
            one_hot = F.one_hot(sample_experts(routing.probs, *generators), self.num_experts).to(routing.probs.dtype)
            return self.combine(self.all_experts(x), one_hot + routing.probs - routing.probs.detach())
        if self.num_experts == 1:
            return self.one_expert(x, 0)
        by_expert, counts = routing.expert.argsort(stable=True), routing.expert.bincount(minlength=self.num_experts)
        parts = x[by_expert].split(counts.tolist())
        outputs = [self.one_expert(part, number) for number, part in enumerate(parts) if part.size(0)]
        return torch.cat(outputs)[by_expert.argsort()]

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Initialize the gate and the experts with the only random generator in ``generators``."""
        init_as_linear(self.gate.weight, self.gate.bias, *generators)
        for module in self.expert_modules():
            if hasattr(module, "reset_parameters"):  # batch norm does not have the method
                reset: Any = module.reset_parameters
                reset([*generators] * self.num_experts)

    def shares(self) -> Tensor:
        """Return the weight of each expert for each image of the last batch, (B, E); rows sum to 1."""
        assert self.routing is not None
        if self.is_hard:
            return F.one_hot(self.routing.expert, self.num_experts).to(self.routing.probs.dtype)
        return self.routing.probs

    def grow(self, expert: int, generator: Generator, method: str = "split") -> None:
        """Add an expert as a copy of ``expert``; see `ParallelGate.grow` for the arguments.

        ``split`` does not change the layer's output. ``copy`` can change the output and the probabilities.
        """
        growth = self.gate.grow(expert, generator, method)
        for module in self.expert_modules():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                grown = gather_slices(tensor.detach(), growth.expert_source)
                setattr(module, name, nn.Parameter(grown) if isinstance(tensor, nn.Parameter) else grown)

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules with stacked expert tensors (first dimension E): all children except the gate."""
        return [module for module in self.children() if module is not self.gate]

    def all_experts(self, x: Tensor) -> Tensor:
        """Return the (B, E, …) outputs of all experts for a batch of images."""
        raise NotImplementedError

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        raise NotImplementedError

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        """Return the sum over experts of the (B, E, …) outputs, weighted by the (B, E) weights."""
        raise NotImplementedError


@torch.no_grad()
def sample_experts(probs: Tensor, generator: Optional[Generator] = None) -> Tensor:
    """Return an expert for each image, (B,) int64, sampled from (B, E) probabilities.

    ``generator`` must be on the CPU, so that samples do not depend on the device; None: torch's global generator.
    """
    noise = torch.rand(probs.size(0), 1, generator=generator).to(probs.device)
    return (probs.float().cumsum(dim=1) <= noise).sum(dim=1).clamp(max=probs.size(1) - 1)


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
    """Fully connected network with a hidden layer for each gate tree; each expert of a layer has ``width`` neurons."""

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(num_members=1)
        sizes = itertools.pairwise([math.prod(image_shape)] + [width] * len(trees))
        self.blocks = nn.ModuleList(
            MixtureLinear(before, after, tree, gate) for (before, after), tree in zip(sizes, trees, strict=True)
        )
        self.classifier = MemberLinear(1, width, num_classes)

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
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
    """Split or copy the expert with the largest loss in each layer, in place. Return the indices of these experts."""
    losing = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels).losses]
    for layer, expert in zip(mixture_layers(network), losing, strict=True):
        layer.grow(expert, generator, method)
    return losing
