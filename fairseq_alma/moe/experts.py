"""The experts of a Switch layer: feed-forward networks of one shape, their weights stacked.

Three ways to compute the same thing (figures: README, "Speed"):

- *looped*, on a CPU: one product per expert over just the rows it takes (`LoopedGroupedLinear`);
- *grouped*, on CUDA in bf16, by weights or ``--autocast bf16``: all experts in one kernel
  (``torch.nn.functional.grouped_mm``), no wait for their counts;
- *padded*, elsewhere on a GPU: a batched product over equally many rows per expert.

Letters: S tokens, E experts, C capacity, M model dim, F feed-forward dim, I input and O output features of one map.
"""

from typing import Any, Callable, Optional

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
        activation: the function between the two maps.
        activation_dropout: probability of dropping a hidden value.

    Attributes:
        exchange: brings tokens to the experts of other processes, where each has but a share of them (see
            ``expert_parallel``).
    """

    exchange: Optional[Callable[[Tensor, Dispatch, Callable[[Tensor, Dispatch], Tensor]], Tensor]] = None

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        ffn_dim: int,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
        self.fc1_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, model_dim, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.zeros(num_experts, model_dim))
        self.activation = activation
        self.activation_dropout = activation_dropout
        for expert in range(num_experts):  # each expert as fairseq initialises the linear maps of a dense layer
            nn.init.xavier_uniform_(self.fc1_weight[expert])
            nn.init.xavier_uniform_(self.fc2_weight[expert])

    @property
    def num_experts(self) -> int:
        """E, of this process."""
        return self.fc1_weight.size(0)

    def forward(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        """Apply the experts.

        Args:
            x: (S, M) tokens.
            dispatch: which expert takes which token.

        Returns:
            (S, M); rows that no expert takes are zero, or, where ``grouped`` serves, any finite number:
            the caller's factor of zero removes them.
        """
        return self._own(x, dispatch) if self.exchange is None else self.exchange(x, dispatch, self._own)

    def _own(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        """Apply the experts of this process."""
        if x.device.type == "cpu":
            return self._looped(x, dispatch)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
            return self._grouped(x, dispatch)
        return self._padded(x, dispatch)

    def _hidden(self, pre_activation: Tensor) -> Tensor:
        return F.dropout(self.activation(pre_activation), self.activation_dropout, self.training)

    def _looped(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        counts = dispatch.counts.tolist()
        taken = dispatch.order[: sum(counts)]
        hidden = self._hidden(_looped_linear(x[taken], self.fc1_weight, self.fc1_bias, counts))
        out = _looped_linear(hidden, self.fc2_weight, self.fc2_bias, counts).to(x.dtype)
        return x.new_zeros(x.shape).index_copy(0, taken, out)

    def _grouped(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        num_experts = self.num_experts
        ends = dispatch.counts.cumsum(0)
        expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        # Rows that nobody takes stand last; the last expert computes them too, which costs no more than a full
        # capacity would and keeps uninitialised memory out of the gradients. Their factor is zero.
        expert = expert.clamp(max=num_experts - 1)
        ends = torch.cat([ends[:-1], ends.new_full((1,), len(x))]).int()
        # As autocast would, which does not know this product; without it they are in this precision already.
        weights = (self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias)
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = (weight.to(x.dtype) for weight in weights)
        rows = F.grouped_mm(x[dispatch.order], fc1_weight.transpose(1, 2), offs=ends)
        hidden = self._hidden(rows + fc1_bias[expert])
        out = F.grouped_mm(hidden, fc2_weight.transpose(1, 2), offs=ends) + fc2_bias[expert]
        return torch.empty_like(x).index_copy(0, dispatch.order, out)

    def _padded(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        num_experts, model_dim = self.num_experts, x.size(1)
        capacity = dispatch.capacity if dispatch.capacity is not None else max(1, int(dispatch.counts.max()))
        ends = dispatch.counts.cumsum(0)
        position = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, position, right=True)  # E for rows that nobody takes
        starts = torch.cat([ends - dispatch.counts, ends[-1:]])
        slot = (expert * capacity + position - starts[expert]).clamp(max=num_experts * capacity)
        slots = x.new_zeros(num_experts * capacity + 1, model_dim).index_copy(0, slot, x[dispatch.order])
        rows = slots[:-1].view(num_experts, capacity, model_dim)
        hidden = self._hidden(torch.baddbmm(self.fc1_bias[:, None], rows, self.fc1_weight.transpose(1, 2)))
        out = torch.baddbmm(self.fc2_bias[:, None], hidden, self.fc2_weight.transpose(1, 2)).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, model_dim)])
        return torch.empty_like(x).index_copy(0, dispatch.order, out[slot])

    def extra_repr(self) -> str:
        """Show E, M and F."""
        num_experts, ffn_dim, model_dim = self.fc1_weight.shape
        return f"num_experts={num_experts}, model_dim={model_dim}, ffn_dim={ffn_dim}"


def _looped_linear(x: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
    """Apply each expert's map to its rows, in autocast's precision where that is on, as ``F.linear`` would."""
    if torch.is_autocast_enabled("cpu"):
        x = x.to(torch.get_autocast_dtype("cpu"))
    return LoopedGroupedLinear.apply(x, weight, bias, counts)


class LoopedGroupedLinear(torch.autograd.Function):
    """Apply expert e's map to its slice of the rows, one expert after the other; rows are sorted by expert.

    The gradients are written by hand: each product goes straight into its slice of the stacked gradient, where
    autograd would build a full-sized zero tensor per expert and add them all up. Where rows are in bf16 and weights in
    fp32, one expert's weights at a time are copied, which stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        """Compute ``x @ weight[e].T + bias[e]`` for each slice.

        Args:
            ctx: autograd's context.
            x: (S, I) rows sorted by expert.
            weight: (E, O, I).
            bias: (E, O).
            counts: number of rows of each expert; they sum to S.

        Returns:
            (S, O), in the precision of ``x``.
        """
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.size(0), weight.size(1))
        for expert, rows in _slices(counts):
            torch.addmm(bias[expert].to(x.dtype), x[rows], weight[expert].to(x.dtype).t(), out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute the gradients of rows, weights and biases, each product straight into its place."""
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight)
        grad_bias = weight.new_zeros(weight.shape[:2])
        for expert, rows in _slices(ctx.counts):
            torch.mm(grad[rows], weight[expert].to(x.dtype), out=grad_x[rows])
            if weight.dtype == x.dtype:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
            else:
                grad_weight[expert] = torch.mm(grad[rows].t(), x[rows])
            torch.sum(grad[rows], dim=0, out=grad_bias[expert])
        return grad_x, grad_weight, grad_bias, None


def _slices(counts: list[int]) -> list[tuple[int, slice]]:
    """Return (expert, its slice of the rows); [2, 0, 3] gives (0, 0:2), (1, 2:2), (2, 2:5)."""
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    return [(expert, slice(end - count, end)) for expert, (end, count) in enumerate(zip(ends, counts, strict=True))]
