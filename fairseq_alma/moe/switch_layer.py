"""The Switch layer: a sparse feed-forward layer in which each token passes through one of E experts.

Fedus et al. 2021, "Switch Transformers", sections 2.1 and 2.2, with padding left out of capacity and balance.

Letters: S tokens, E experts, M model dim, F feed-forward dim.
"""

from typing import Callable, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import dispatch_tokens
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.gate import DescendingGate, Routing
from fairseq_alma.moe.short_copies import HAS_OUT_DTYPE, ShortGate, short_dtype


class SwitchStatistics(NamedTuple):
    """What one Switch layer did with one batch.

    Attributes:
        probs: (S, E) fp32 with gradient, the gate's probabilities, zero for padding.
        starts: (E + 1,), as in `Dispatch`; ``limit`` likewise.
    """

    probs: Tensor
    starts: Tensor
    limit: Union[int, Tensor, None]

    @property
    def routed(self) -> Tensor:
        """Real tokens per expert, overflow included, (E,)."""
        return self.starts.diff()

    @property
    def balance_loss(self) -> Tensor:
        """The loss of this layer alone, scalar; see `SwitchTotals`."""
        return SwitchTotals.of([self]).balance_losses[0]


class SwitchTotals(NamedTuple):
    """What L Switch layers did with one batch.

    Attributes:
        balance_losses: (L,) fp32 with gradient, E x sum over experts of (share of tokens) x (mean probability);
            1 when balanced (Fedus et al. 2021, equations 4 to 6), not yet weighted.
        num_tokens: (L,), real tokens.
        num_dropped: (L,), real tokens over capacity.
        routed: (L, E), real tokens per expert, overflow included.
        entropies: (L,) fp32, sum over real tokens of the entropy of the gate's probabilities, in nats.
    """

    balance_losses: Tensor
    num_tokens: Tensor
    num_dropped: Tensor
    routed: Tensor
    entropies: Tensor

    @classmethod
    def of(cls, layers: Sequence[SwitchStatistics]) -> "SwitchTotals":
        """Add up for all layers together, which a GPU does in the time of one; they have as many experts each."""
        limit, num_experts = layers[0].limit, layers[0].probs.size(1)
        if layers[0].probs.is_cuda:
            return cls._in_few_operations(layers)
        routed = torch.stack([layer.starts for layer in layers]).diff()
        num_tokens = routed.sum(1)
        per_token = num_tokens.clamp(min=1).reciprocal().unsqueeze(1)
        shares = routed * per_token
        means = torch.stack([layer.probs.sum(0) for layer in layers]) * per_token
        balance_losses = torch.stack([num_experts * torch.dot(*each) for each in zip(shares, means, strict=True)])
        with torch.no_grad():
            probs = torch.stack([layer.probs for layer in layers])
            entropies = -torch.xlogy(probs, probs).sum((1, 2))
        taken = num_tokens if limit is None else routed.clamp(max=limit).sum(1)
        return cls(balance_losses, num_tokens, num_tokens - taken, routed, entropies)

    @classmethod
    def _in_few_operations(cls, layers: Sequence[SwitchStatistics]) -> "SwitchTotals":
        """Compute the same on a GPU, where the number of operations decides; rounded otherwise."""
        limit, probs = layers[0].limit, torch.stack([layer.probs for layer in layers])
        starts = torch.stack([layer.starts for layer in layers])
        routed, num_tokens = starts.diff(), starts[:, -1]
        tokens = num_tokens.unsqueeze(1).clamp(min=1)
        balance_losses = probs.size(2) * (routed / tokens * (probs.sum(1) / tokens)).sum(1)
        with torch.no_grad():
            entropies = torch.special.entr(probs).sum((1, 2))
            dropped = torch.zeros_like(num_tokens) if limit is None else (routed - limit).clamp_(min=0).sum(1)
        return cls(balance_losses, num_tokens, dropped, routed, entropies)


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

    def forward(
        self, x: Tensor, padding: Optional[Tensor] = None, numbers: Optional[Tensor] = None
    ) -> tuple[Tensor, Routing, SwitchStatistics]:
        """Apply the layer, without the residual.

        Args:
            x: (S, M) tokens, in the order in which they take the experts' places.
            padding: (S,) bool, True where a token is padding.
            numbers: as in `dispatch_tokens`.

        Returns:
            The (S, M) output, zero for padding and for tokens over capacity; the routing; the statistics.
        """
        if HAS_OUT_DTYPE and x.dtype == short_dtype(x):
            x, logits = ShortGate.apply(x, self.gate.weight)
            routing = self.gate.route(logits)
        else:
            routing = self.gate(x)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        dispatch = dispatch_tokens(routing, factor, padding, numbers, self.experts.is_by_places(x, factor))
        out = self.experts(x, dispatch, routing.combine_weights)
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(-1), 0.0)
        return out, routing, SwitchStatistics(probs, dispatch.starts, dispatch.limit)
