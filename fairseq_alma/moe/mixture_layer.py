"""Base class of mixture-of-experts layers for images (paper v5, section 4.2 and Appendix A).

With a ``soft`` gate, a layer returns the mean of the expert outputs, weighted by the gate's probabilities. With a
``hard`` gate, a layer returns the output of one expert for each image: in training, an expert sampled from the
probabilities, with the straight-through gradient (Bengio et al. 2013); in evaluation, the expert in `Routing.expert`.
Training computes all experts in one operation. Evaluation with a hard gate computes only the selected experts.

Letters: S images, I input features of the gate, E experts.
"""

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import gather_slices
from fairseq_alma.moe.gate import ParallelGate, Routing, dispatch_tokens, init_as_linear


class MixtureLayer(nn.Module):
    """Mixture of experts with a gate tree; a subclass defines the experts.

    The gate's input is the layer input (S, I), or the channel means of a layer input (S, I, H, W).

    Args:
        in_features: I, number of input features of the gate.
        tree: gate tree.
        gate: ``soft`` or ``hard``.

    Attributes:
        routing: routing of the last batch, without gradient; `ExpertLosses` uses the routing.
        gate_input: (S, I), input of the gate for the last batch.
    """

    def __init__(self, in_features: int, tree: GateTree, gate: str) -> None:
        super().__init__()
        self.gate = ParallelGate(in_features, tree)
        self.is_hard = gate == "hard"
        self.routing: Optional[Routing] = None
        self.gate_input: Optional[Tensor] = None

    @property
    def num_experts(self) -> int:
        """Return the number of experts, E."""
        return self.gate.tree.num_experts

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Return the layer output for a batch. In training, a hard gate samples experts; see `sample_experts`."""
        features = x.mean(dim=(2, 3)) if x.dim() == 4 else x
        routing = self.gate(features)
        probs = routing.probs.detach()
        self.routing = Routing(routing.expert, probs, combine_weights=probs)
        self.gate_input = features.detach()
        if not self.is_hard:
            return self.combine(self.all_experts(x), routing.combine_weights)
        if self.training:
            one_hot = F.one_hot(sample_experts(routing.probs, *generators), self.num_experts).to(routing.probs.dtype)
            return self.combine(self.all_experts(x), one_hot + routing.probs - routing.probs.detach())
        if self.num_experts == 1:
            return self.one_expert(x, 0)
        dispatch = dispatch_tokens(routing, capacity_factor=0)
        parts = x[dispatch.tokens].split(dispatch.counts)
        outputs = [self.one_expert(part, number) for number, part in enumerate(parts) if part.size(0)]
        return torch.cat(outputs)[dispatch.tokens.argsort()]

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Initialize the gate and the experts with the only random generator in ``generators``."""
        init_as_linear(self.gate.weight, self.gate.bias, *generators)
        for module in self.expert_modules():
            if hasattr(module, "reset_parameters"):  # batch norm does not have the method
                reset: Any = module.reset_parameters
                reset([*generators] * self.num_experts)

    def shares(self) -> Tensor:
        """Return the weight of each expert for each image of the last batch, (S, E); rows sum to 1."""
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
        """Return the (S, E, …) outputs of all experts for a batch of S images."""
        raise NotImplementedError

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return the output of one expert for a batch of images."""
        raise NotImplementedError

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        """Return the sum over experts of the (S, E, …) outputs, weighted by the (S, E) weights."""
        raise NotImplementedError


@torch.no_grad()
def sample_experts(probs: Tensor, generator: Optional[Generator] = None) -> Tensor:
    """Return an expert for each image, (S,) int64, sampled from (S, E) probabilities.

    ``generator`` must be on the CPU, so that samples do not depend on the device; None: torch's global generator.
    """
    noise = torch.rand(probs.size(0), 1, generator=generator).to(probs.device)
    return (probs.float().cumsum(dim=1) <= noise).sum(dim=1).clamp(max=probs.size(1) - 1)
