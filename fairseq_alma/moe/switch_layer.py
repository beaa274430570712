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
        num_tokens: scalar int64, real tokens.
        num_dropped: scalar int64, real tokens over capacity.
        routed: (E,) int64, real tokens per expert, overflow included.
        entropy: scalar fp32, sum over real tokens of the entropy of the gate's probabilities, in nats.
    """

    balance_loss: Tensor
    num_tokens: Tensor
    num_dropped: Tensor
    routed: Tensor
    entropy: Tensor


class SwitchLayer(nn.Module):
    """Route each token to its best expert and scale the expert's output by the gate's probability.

    Args:
        model_dim: M.
        ffn_dim: F, hidden size of each expert.
        tree: the gate's choices; `GateTree.flat(E)` for a plain Switch layer.
        capacity_factor: places per expert in training, as a multiple of an even share of the tokens; 0: no limit.
        eval_capacity_factor: the same at test; the default 0 drops no token, so results do not depend on the batch.
        activation: the experts' activation function.
        activation_dropout: probability of dropping a hidden value of an expert.
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
    ) -> None:
        super().__init__()
        self.gate = DescendingGate(model_dim, tree)
        self.experts = Experts(tree.num_experts, model_dim, ffn_dim, activation, activation_dropout)
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor

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
        out = self.experts(x, dispatch)
        combine_weights = routing.combine_weights
        if dispatch.is_taken is not None:  # zero for every token that nobody takes
            is_taken = torch.empty_like(dispatch.is_taken).scatter_(0, dispatch.order, dispatch.is_taken)
            combine_weights = combine_weights * is_taken
        return out * combine_weights.unsqueeze(-1).to(out.dtype), routing, self._statistics(routing, dispatch, padding)

    def _statistics(self, routing: Routing, dispatch: Dispatch, padding: Optional[Tensor]) -> SwitchStatistics:
        num_experts = routing.probs.size(1)
        num_tokens = dispatch.routed.sum()
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(-1), 0.0)
        per_token = 1.0 / num_tokens.clamp(min=1)
        balance_loss = num_experts * torch.dot(dispatch.routed * per_token, probs.sum(0) * per_token)
        with torch.no_grad():
            entropy = -torch.xlogy(probs, probs).sum()
        return SwitchStatistics(balance_loss, num_tokens, num_tokens - dispatch.counts.sum(), dispatch.routed, entropy)
