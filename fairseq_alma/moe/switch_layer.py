"""The Switch layer: a sparse feed-forward layer in which each token passes through one of E experts.

Fedus et al. 2021, "Switch Transformers", sections 2.1 and 2.2, with padding left out of capacity and balance.

Letters: S tokens, E experts, M model dim, F feed-forward dim.
"""

from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import Dispatch, dispatch_tokens
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.gate import DescendingGate, Routing


class SwitchStatistics(NamedTuple):
    """What one Switch layer did with one batch.

    Attributes:
        balance_loss: scalar fp32 with gradient, E x sum over experts of (share of tokens) x (mean probability);
            1 when balanced (Fedus et al. 2021, equations 4 to 6), not yet weighted.
        routed: for each expert the number of real tokens sent to it, overflow included.
        num_dropped: real tokens over capacity.
        entropy: scalar fp32, sum over real tokens of the entropy of the gate's probabilities, in nats.
    """

    balance_loss: Tensor
    routed: list[int]
    num_dropped: int
    entropy: Tensor

    @classmethod
    def of(cls, routing: Routing, dispatch: Dispatch, padding: Optional[Tensor]) -> "SwitchStatistics":
        """Compute the statistics of a batch of S tokens; ``padding`` as in `SwitchLayer.forward`."""
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(1), 0.0)
        num_tokens, num_experts = sum(dispatch.routed), probs.size(1)
        per_token = 1.0 / max(num_tokens, 1)
        shares = torch.tensor(dispatch.routed, dtype=probs.dtype, device=probs.device) * per_token
        balance_loss = num_experts * torch.dot(shares, probs.sum(0) * per_token)
        entropy = torch.special.entr(probs.detach()).sum()
        return cls(balance_loss, dispatch.routed, num_tokens - sum(dispatch.counts), entropy)


class SwitchLayer(nn.Module):
    """Route each token to its best expert and scale the expert's output by the gate's probability.

    Args:
        model_dim: M.
        ffn_dim: F, hidden size of each expert.
        tree: the gate's choices; `GateTree.flat(E)` for a plain Switch layer.
        capacity_factor: capacity of an expert in training, as a multiple of an even share of the tokens; 0: no limit.
        eval_capacity_factor: the same at test; the default 0 drops no token, so results do not depend on the batch.
        activation: activation function of experts that are not gated.
        activation_dropout: probability of dropping a hidden value of an expert.
        gated: SwiGLU experts without biases; see `Experts`.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        tree: GateTree,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.gate = DescendingGate(model_dim, tree)
        self.experts = Experts(tree.num_experts, model_dim, ffn_dim, gated, activation, activation_dropout)
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor

    @torch.compiler.disable  # the host reads how many tokens each expert takes, which a compiled graph cannot
    def forward(self, x: Tensor, padding: Optional[Tensor] = None) -> tuple[Tensor, Routing, SwitchStatistics]:
        """Apply the layer, without the residual.

        Args:
            x: (S, M) tokens, in the order in which they take the experts' places.
            padding: (S,) bool, True where a token is padding.

        Returns:
            The (S, M) output, zero for padding and for tokens over capacity; the routing; the statistics.
        """
        routing = self.gate(x)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        dispatch = dispatch_tokens(routing, factor, padding)
        out = self.experts(x, dispatch, routing.combine_weights)
        return out, routing, SwitchStatistics.of(routing, dispatch, padding)
