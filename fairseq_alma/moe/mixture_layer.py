"""A layer that is a mixture of experts over a tree of choices; a subclass defines the experts.

Paper v5, section 4.2 and Appendix A. All experts are computed in one operation. ``soft``: the mean of the experts'
outputs, weighted by their probabilities. ``hard``: in training one expert is drawn for each image, and the gate gets
the gradient of the probabilities (straight-through, Bengio et al. 2013); at test each image gets the expert on the best
path, and only chosen experts are computed.

Letters: S images, I features that the gate sees, E experts.
"""

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import gather_slices
from fairseq_alma.moe.dispatch import dispatch_tokens
from fairseq_alma.moe.gate import ParallelGate, Routing

GATES = ("soft", "hard")


class MixtureLayer(nn.Module):
    """Route images to experts and combine the outputs.

    Args:
        in_features: I.
        tree: choices of the gate.
        gate: ``soft`` or ``hard``.

    Attributes:
        routing: routing of the last batch, without a gradient; growth reads it.
        gate_input: (S, I), input of the gate for the last batch.
    """

    def __init__(self, in_features: int, tree: GateTree, gate: str) -> None:
        super().__init__()
        assert gate in GATES
        self.gate = ParallelGate(in_features, tree)
        self.is_hard = gate == "hard"
        self.routing: Optional[Routing] = None
        self.gate_input: Optional[Tensor] = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate.tree.num_experts

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map a batch of images; at most one generator draws the experts of a hard gate."""
        features = self.gate_features(x)
        routing = self.gate(features)
        probs = routing.probs.detach()
        self.routing = Routing(routing.expert, probs, combine_weights=probs)
        self.gate_input = features.detach()
        if not self.is_hard:
            return self.combine(self.all_experts(x), routing.combine_weights)
        if self.training:
            one_hot = F.one_hot(draw(routing.probs, *generators), self.num_experts).to(routing.probs.dtype)
            return self.combine(self.all_experts(x), one_hot + routing.probs - routing.probs.detach())
        return self._chosen_experts(x, routing)

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights from the only generator, those of the experts one after the other."""
        self.gate.reset_parameters(generators)
        for module in self.expert_modules():
            if hasattr(module, "reset_parameters"):  # batch norm has none
                reset: Any = module.reset_parameters
                reset([*generators] * self.num_experts)

    def shares(self) -> Tensor:
        """Return the (S, E) share of each expert in each image of the last batch; rows sum to 1."""
        assert self.routing is not None
        if self.is_hard:
            return F.one_hot(self.routing.expert, self.num_experts).to(self.routing.probs.dtype)
        return self.routing.probs

    def grow(self, expert: int, generator: Generator, method: str = "split") -> None:
        """Add expert E as a copy of ``expert``; arguments as in `ParallelGate.grow`.

        A ``split`` keeps the output of the layer; after a ``copy`` the two experts together weigh more than the one.
        """
        growth = self.gate.grow(expert, generator, method)
        for module in self.expert_modules():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                grown = gather_slices(tensor.detach(), growth.expert_source)
                setattr(module, name, nn.Parameter(grown) if isinstance(tensor, nn.Parameter) else grown)

    def gate_features(self, x: Tensor) -> Tensor:
        """Return (S, I), the input of the gate."""
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

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        """Return the sum over the experts' outputs with (S, E) weights."""
        raise NotImplementedError

    def _chosen_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute each image by its expert only."""
        if self.num_experts == 1:
            return self.one_expert(x, 0)
        dispatch = dispatch_tokens(routing, capacity_factor=0)
        parts = x[dispatch.tokens].split(dispatch.counts)
        outputs = [self.one_expert(part, number) for number, part in enumerate(parts) if part.size(0)]
        return torch.cat(outputs)[dispatch.tokens.argsort()]


@torch.no_grad()
def draw(probs: Tensor, generator: Optional[Generator] = None) -> Tensor:
    """Draw one expert for each image: (S, E) probabilities on any device give (S,) int64.

    The generator is on the CPU, so that all devices draw the same; None: torch's global generator.
    """
    noise = torch.rand(probs.size(0), 1, generator=generator).to(probs.device)
    return (probs.float().cumsum(dim=1) <= noise).sum(dim=1).clamp(max=probs.size(1) - 1)
