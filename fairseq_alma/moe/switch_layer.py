"""The Switch layer: a sparse feed-forward layer in which each token passes through one of E experts.

Fedus et al. 2021, "Switch Transformers", sections 2.1 and 2.2. Padding does not count for capacity and balance.

Letters: S tokens, E experts, M model dim, F feed-forward dim.
"""

from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import Dispatch, dispatch_tokens
from fairseq_alma.moe.gate import DescendingGate, Routing


class Experts(nn.Module):
    """Feed-forward networks of equal shape with stacked weights, computed one after the other.

    Args:
        num_experts: E.
        model_dim: M.
        ffn_dim: F.
        gated: SwiGLU without biases (``gate_proj``, ``up_proj``, ``down_proj``, the last is zero at first); else two
            linear maps with biases (``fc1``, ``fc2``), as in the paper.
        activation: activation function of experts that are not gated.
        activation_dropout: probability of dropping a hidden value.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        ffn_dim: int,
        gated: bool = False,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_experts, self.gated = num_experts, gated
        self.activation, self.activation_dropout = activation, activation_dropout
        if gated:
            self.gate_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.down_proj = nn.Parameter(torch.zeros(num_experts, model_dim, ffn_dim))
            drawn = (self.gate_proj, self.up_proj)
        else:
            self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.fc1_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
            self.fc2_weight = nn.Parameter(torch.empty(num_experts, model_dim, ffn_dim))
            self.fc2_bias = nn.Parameter(torch.zeros(num_experts, model_dim))
            drawn = (self.fc1_weight, self.fc2_weight)
        for expert in range(num_experts):  # each expert as fairseq initialises the linear maps of a dense layer
            for weight in drawn:
                nn.init.xavier_uniform_(weight[expert])

    def forward(self, x: Tensor, dispatch: Dispatch, combine_weights: Tensor) -> Tensor:
        """Apply to each token its expert, and multiply the output by the token's combine weight.

        Args:
            x: (S, M) tokens.
            dispatch: tokens of each expert.
            combine_weights: (S,) fp32.

        Returns:
            (S, M) in the precision of ``x``; zero for tokens without an expert.
        """
        rows = x[dispatch.tokens].split(dispatch.counts)
        # Slices of the stacked weights by `unbind`, whose gradient is one stack instead of E sums of padded tensors.
        weights = zip(*(weight.unbind() for weight in self.parameters()), strict=True)
        out = torch.cat([self._apply_one(part, *each) for part, each in zip(rows, weights, strict=True)])
        out = out * combine_weights[dispatch.tokens].unsqueeze(1)
        return x.new_zeros(x.shape).index_copy(0, dispatch.tokens, out.to(x.dtype))

    def _apply_one(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Apply one expert; ``weights`` are its slices of the parameters, in their order."""
        if self.gated:
            gate_proj, up_proj, down_proj = weights
            hidden, last = F.silu(F.linear(x, gate_proj)) * F.linear(x, up_proj), [down_proj]
        else:
            fc1_weight, fc1_bias, *last = weights
            hidden = self.activation(F.linear(x, fc1_weight, fc1_bias))
        return F.linear(F.dropout(hidden, self.activation_dropout, self.training), *last)


class SwitchStatistics(NamedTuple):
    """Statistics of a Switch layer for one batch.

    Attributes:
        balance_loss: scalar fp32 with gradient, E x sum over experts of (share of tokens) x (mean probability);
            1 when balanced (Fedus et al. 2021, equations 4 to 6), unweighted.
        routed: for each expert the number of real tokens routed to it, including overflow.
        num_dropped: number of real tokens over capacity.
        entropy: scalar fp32, sum over real tokens of the entropy of the gate's probabilities, in nats.
    """

    balance_loss: Tensor
    routed: list[int]
    num_dropped: int
    entropy: Tensor


class SwitchLayer(nn.Module):
    """Route each token to its best expert; scale the expert's output by the gate's probability.

    Args:
        model_dim: M.
        ffn_dim: F, hidden size of each expert.
        tree: choices of the gate; `GateTree.flat(E)` for a plain Switch layer.
        capacity_factor: capacity of an expert in training, as a multiple of an even share of the tokens; 0: no limit.
        eval_capacity_factor: the same at test; the default 0 drops no token, so results do not depend on the batch.
        activation: see `Experts`.
        activation_dropout: see `Experts`.
        gated: see `Experts`.
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
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor

    @torch.compiler.disable  # the host reads the number of tokens of each expert, which a compiled graph cannot
    def forward(self, x: Tensor, padding: Optional[Tensor] = None) -> tuple[Tensor, Routing, SwitchStatistics]:
        """Apply the layer, without the residual.

        Args:
            x: (S, M) tokens; earlier tokens take the places of an expert first.
            padding: (S,) bool, True where a token is padding.

        Returns:
            The (S, M) output, zero for padding and for tokens over capacity; the routing; the statistics.
        """
        routing = self.gate(x)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        dispatch = dispatch_tokens(routing, factor, padding)
        out = self.experts(x, dispatch, routing.combine_weights)
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(1), 0.0)
        num_tokens = sum(dispatch.routed)
        per_token = 1.0 / max(num_tokens, 1)
        shares = torch.tensor(dispatch.routed, dtype=probs.dtype, device=probs.device) * per_token
        balance_loss = probs.size(1) * torch.dot(shares, probs.sum(0) * per_token)
        entropy = torch.special.entr(probs.detach()).sum()
        num_dropped = num_tokens - sum(dispatch.counts)
        return out, routing, SwitchStatistics(balance_loss, dispatch.routed, num_dropped, entropy)
