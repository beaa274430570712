"""Mixtures of experts over a tree of choices: a linear layer, or a convolution, with ReLU as expert.

Paper v5, section 4.2 and Appendix A. All experts are computed in one operation. ``soft``: the mean of the experts'
outputs, weighted by their probabilities. ``hard``: in training one expert is drawn for each image, and the gate gets
the gradient of the probabilities in its place (straight-through, Bengio et al. 2013); at test the tree's best path
decides, and only the experts that are chosen are computed.

Letters: B images, E experts, I input and O output features or channels, H and W height and width.
"""

from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.modules.images.member_layers import BATCH_NORM_EPS, MemberBatchNorm2d, MemberConv2d, MemberLinear
from fairseq_alma.modules.moe.tree_gate import TreeGate, TreeRouting

GATES = ("soft", "hard")


class MixtureBlock(nn.Module):
    """A layer that is a mixture; a subclass says what an expert is.

    Attributes:
        routing: what was decided for the last images, for the choice of the expert that grows.

    Args:
        in_features: I, the size of what the gate sees.
        tree: the choices.
        gate: ``soft`` or ``hard``.
    """

    def __init__(self, in_features: int, tree: GateTree, gate: str) -> None:
        super().__init__()
        assert gate in GATES
        self.gate = TreeGate(in_features, tree)
        self.is_hard = gate == "hard"
        self.routing: Optional[TreeRouting] = None
        self.gate_input: Optional[Tensor] = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate.tree.num_experts

    def forward(self, x: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Map a batch; see `all_experts` for the shapes, `ImageNetwork.forward` for the generator."""
        features = self.gate_features(x)
        routing = self.gate(features)
        self.routing = TreeRouting(routing.probs.detach(), routing.expert)
        self.gate_input = features.detach()
        if not self.is_hard:
            return self.mix(self.all_experts(x), routing.probs)
        if self.training:
            one_hot = F.one_hot(draw(routing.probs, generator), self.num_experts).to(routing.probs.dtype)
            return self.mix(self.all_experts(x), one_hot + routing.probs - routing.probs.detach())
        return self._chosen_experts(x, routing.expert)

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights, those of the experts one after the other; there is one generator, for one member."""
        self.gate.reset_parameters(generators)
        for module in self.expert_modules():
            if isinstance(module, (MemberLinear, MemberConv2d)):
                module.reset_parameters([*generators] * self.num_experts)

    def shares(self) -> Tensor:
        """Return (B, E): how much of each of the last images went through each expert; rows sum to 1."""
        assert self.routing is not None
        if self.is_hard:
            return F.one_hot(self.routing.expert, self.num_experts).to(self.routing.probs.dtype)
        return self.routing.probs

    def split(self, expert: int, generator: Generator) -> None:
        """Make two equal experts of one, under a new random choice; the layer's output stays the same.

        Args:
            expert: number of the expert; the new one becomes expert E.
            generator: of the new choice's weights, on the CPU.
        """
        self.gate.split(expert, generator)
        for module in self.expert_modules():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                grown = torch.cat([tensor.detach(), tensor.detach()[expert : expert + 1]])
                setattr(module, name, nn.Parameter(grown) if isinstance(tensor, nn.Parameter) else grown)

    def gate_features(self, x: Tensor) -> Tensor:
        """Return (B, I): what the gate sees."""
        raise NotImplementedError

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules whose tensors have the experts as their first dimension."""
        raise NotImplementedError

    def all_experts(self, x: Tensor) -> Tensor:
        """Return the output of every expert for every image."""
        raise NotImplementedError

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return the output of one expert for images."""
        raise NotImplementedError

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over the experts' outputs with (B, E) weights."""
        raise NotImplementedError

    def _chosen_experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """Compute each image by its own expert alone."""
        if self.num_experts == 1:
            return self.one_expert(x, 0)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.num_experts).tolist()
        parts = x[order].split(counts)
        outputs = [self.one_expert(part, number) for number, part in enumerate(parts) if part.size(0)]
        return torch.cat(outputs)[order.argsort()]


@torch.no_grad()
def draw(probs: Tensor, generator: Optional[Generator]) -> Tensor:
    """Draw one expert for each image.

    Args:
        probs: (B, E), on any device; rows sum to 1.
        generator: on the CPU, so that all devices draw the same; None: torch's global one.

    Returns:
        (B) int64.
    """
    noise = torch.rand(probs.size(0), 1, generator=generator).to(probs.device)
    return (probs.float().cumsum(dim=1) <= noise).sum(dim=1).clamp(max=probs.size(1) - 1)


class MixtureLinear(MixtureBlock):
    """Experts are linear layers with ReLU; maps (B, I) to (B, O)."""

    def __init__(self, in_features: int, out_features: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_features, tree, gate)
        self.linear = MemberLinear(tree.num_experts, in_features, out_features)

    def gate_features(self, x: Tensor) -> Tensor:
        """Return the layer's input itself."""
        return x

    def expert_modules(self) -> list[nn.Module]:
        """Return the linear layer."""
        return [self.linear]

    def all_experts(self, x: Tensor) -> Tensor:
        """Return (B, E, O)."""
        out = F.linear(x, self.linear.weight.flatten(0, 1), self.linear.bias.flatten())
        return F.relu(out).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return (B, O)."""
        return F.relu(F.linear(x, self.linear.weight[expert], self.linear.bias[expert]))

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return (B, O)."""
        return torch.bmm(weights[:, None], outputs)[:, 0]


class MixtureConv(MixtureBlock):
    """Experts are convolution, batch norm and ReLU; maps (B, I, H, W) to (B, O, H, W).

    The gate sees the mean of each channel over the image.
    """

    def __init__(self, in_channels: int, out_channels: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_channels, tree, gate)
        self.conv = MemberConv2d(tree.num_experts, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(tree.num_experts, out_channels)

    def gate_features(self, x: Tensor) -> Tensor:
        """Return (B, I) means over the image."""
        return x.mean(dim=(2, 3))

    def expert_modules(self) -> list[nn.Module]:
        """Return convolution and batch norm."""
        return [self.conv, self.norm]

    def all_experts(self, x: Tensor) -> Tensor:
        """Return (B, E, O, H, W)."""
        return F.relu(self.norm(self.conv(x))).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return (B, O, H, W), at test."""
        norm = self.norm
        out = F.conv2d(x, self.conv.weight[expert], padding=1)
        scale = norm.weight[expert] * (norm.running_var[expert] + BATCH_NORM_EPS).rsqrt()
        shift = norm.bias[expert] - norm.running_mean[expert] * scale
        return F.relu(out * scale[:, None, None] + shift[:, None, None])

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return (B, O, H, W)."""
        return torch.einsum("be,beohw->bohw", weights, outputs)
