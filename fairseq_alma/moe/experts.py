"""The experts of a Switch layer: feed-forward networks of one shape, with stacked weights, one product for each expert.

Letters: S tokens, E experts, M model dim, F feed-forward dim.
"""

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.moe.dispatch import Dispatch


class Experts(nn.Module):
    """Apply to each token the feed-forward network of the expert that takes it.

    Args:
        num_experts: E.
        model_dim: M.
        ffn_dim: F.
        gated: SwiGLU without biases (``gate_proj``, ``up_proj``, ``down_proj``, the last from zero); else the paper's
            two linear maps with biases (``fc1``, ``fc2``).
        activation: the function between the two maps of experts that are not gated.
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
        self.num_experts = num_experts
        self.gated = gated
        self.activation = activation
        self.activation_dropout = activation_dropout
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
        """Apply the experts.

        Args:
            x: (S, M) tokens.
            dispatch: which expert takes which tokens.
            combine_weights: (S,) fp32, factors of the outputs.

        Returns:
            (S, M) in the precision of ``x``; zero for tokens that no expert takes.
        """
        rows = x[dispatch.tokens].split(dispatch.counts)
        # Slices of the stacked weights by `unbind`, whose gradient is one stack rather than E sums of padded tensors.
        weights = zip(*(weight.unbind() for weight in self.parameters()), strict=True)
        apply = self._gated if self.gated else self._plain
        out = torch.cat([apply(part, *each) for part, each in zip(rows, weights, strict=True)])
        out = out * combine_weights[dispatch.tokens].unsqueeze(1)
        return x.new_zeros(x.shape).index_copy(0, dispatch.tokens, out.to(x.dtype))

    def _plain(self, x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor) -> Tensor:
        return F.linear(self._drop(self.activation(F.linear(x, fc1_weight, fc1_bias))), fc2_weight, fc2_bias)

    def _gated(self, x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
        return F.linear(self._drop(F.silu(F.linear(x, gate_proj)) * F.linear(x, up_proj)), down_proj)

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.activation_dropout, self.training)
