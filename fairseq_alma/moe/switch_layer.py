"""The Switch layer: a sparse feed-forward layer in which each token passes through one of E experts.

Fedus et al. 2021, "Switch Transformers", sections 2.1 and 2.2, with padding left out of capacity and balance.

Letters: S tokens, E experts, M model dim, F feed-forward dim.
"""

from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import dispatch_tokens
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.gate import DescendingGate, Routing
from fairseq_alma.moe.short_copies import WithShort


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
        routed = torch.stack([layer.starts for layer in layers]).diff()
        num_tokens = routed.sum(1)
        per_token = num_tokens.clamp(min=1).reciprocal().unsqueeze(1)
        shares = routed * per_token
        means = torch.stack([layer.probs.sum(0) for layer in layers]) * per_token
        if means.is_cuda:
            balance_losses = num_experts * (shares * means).sum(1)
        else:
            balance_losses = torch.stack([num_experts * torch.dot(*each) for each in zip(shares, means, strict=True)])
        with torch.no_grad():
            probs = torch.stack([layer.probs for layer in layers])
            entropies = -torch.xlogy(probs, probs).sum((1, 2))
        taken = num_tokens if limit is None else routed.clamp(max=limit).sum(1)
        return cls(balance_losses, num_tokens, num_tokens - taken, routed, entropies)


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
        short = x
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x, short = WithShort.apply(x, torch.get_autocast_dtype("cuda"))
        routing = self.gate(x)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        dispatch = dispatch_tokens(routing, factor, padding)
        out = Weighted.apply(self.experts(short, dispatch), routing.combine_weights, dispatch.is_taken)
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(-1), 0.0)
        return out, routing, SwitchStatistics(probs, dispatch.starts, dispatch.limit)


class Weighted(torch.autograd.Function):
    """Rows times the gate's weight of each, zero where nobody takes a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, is_taken: Optional[Tensor]) -> Tensor:
        """Return (S, M) for ``x`` (S, M), fp32 ``weights`` (S,) and ``is_taken`` (S,) bool; None: all are taken."""
        here = weights.to(x.dtype)
        if is_taken is not None:
            here = torch.mul(weights, is_taken, out=x.new_empty(len(x)))
        ctx.save_for_backward(x, here, is_taken)
        ctx.dtype = weights.dtype
        return x * here.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute the gradients of rows and weights."""
        x, here, is_taken = ctx.saved_tensors
        grad_weights = (grads[0] * x).sum(-1, dtype=ctx.dtype)
        grad_weights = grad_weights if is_taken is None else grad_weights * is_taken
        return grads[0] * here.unsqueeze(-1), grad_weights, None
