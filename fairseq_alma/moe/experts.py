"""The experts of a Switch layer: feed-forward networks of one shape, their weights stacked.

Four ways to compute the same thing (figures: README, "Speed"):

- *looped*, on a CPU: one product per expert over just the rows it takes (`LoopedGroupedLinear`);
- *placed*, on a GPU where there is a capacity: a batched product over the places of all experts (`places`);
- *grouped*, on a GPU in bf16, by weights or ``--autocast bf16``: all experts in one kernel
  (``torch.nn.functional.grouped_mm``), where there is no capacity, or a large one from sm_90 on, or an exchange;
- *padded*, elsewhere on a GPU: a batched product over equally many rows per expert, as many as one has.

Letters: S tokens, E experts, C capacity, M model dim, F feed-forward dim, I input and O output features of one map.
"""

import functools
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.moe.dispatch import Dispatch
from fairseq_alma.moe.places import Combined, Placed, PlacedLinear
from fairseq_alma.moe.short_copies import product, short_copy

MANY_PLACES = 1.25
"""Capacity factor above which the empty places cost more than `grouped_mm`, which computes no more than the tokens."""


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

    def is_by_places(self, x: Tensor, capacity_factor: float) -> bool:
        """Return whether tokens are to be dispatched to places: rows without one are computed in vain elsewhere."""
        if not x.is_cuda or self.exchange is not None or capacity_factor <= 0:
            return False
        return capacity_factor <= MANY_PLACES or _dtype(x) != torch.bfloat16 or not _groups_without_wait(x.device)

    def forward(self, x: Tensor, dispatch: Dispatch, weights: Optional[Tensor] = None) -> Tensor:
        """Apply the experts.

        Args:
            x: (S, M) tokens.
            dispatch: which expert takes which token.
            weights: (S,) fp32, factors of the outputs; None: none, where experts are not computed by places.

        Returns:
            (S, M), on a GPU in autocast's precision; rows that no expert takes are zero, or, without weights where
            ``grouped`` serves, any finite number.
        """
        short = x.to(_dtype(x))  # before an exchange between processes, whose traffic it halves
        if dispatch.place is not None:
            return self._placed(short, dispatch, weights)
        out = self._own(short, dispatch) if self.exchange is None else self.exchange(short, dispatch, self._own)
        out = out.to(x.dtype) if x.device.type == "cpu" else out
        return out if weights is None else Weighted.apply(out, weights, dispatch.is_taken)

    def _own(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        """Apply the experts of this process."""
        if x.device.type == "cpu":
            return self._looped(x, dispatch)
        if x.dtype == torch.bfloat16 and (dispatch.capacity is None or _groups_without_wait(x.device)):
            return self._grouped(x, dispatch)
        return self._padded(x, dispatch)

    def _hidden(self, pre_activation: Tensor) -> Tensor:
        return F.dropout(self.activation(pre_activation), self.activation_dropout, self.training)

    def _looped(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        counts, taken = dispatch.counts.tolist(), dispatch.taken()
        hidden = self._hidden(LoopedGroupedLinear.apply(x[taken], self.fc1_weight, self.fc1_bias, counts))
        out = LoopedGroupedLinear.apply(hidden, self.fc2_weight, self.fc2_bias, counts)
        return x.new_zeros(x.shape).index_copy(0, taken, out)

    def _grouped(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        # Every row is computed: that costs no more than a full capacity would, and keeps uninitialised memory out of
        # the gradients. Where nobody takes a row, its factor is zero; padding goes through the last expert.
        ends = dispatch.starts[1:]
        if dispatch.has_padding:
            ends = torch.cat([ends[:-1], ends.new_full((1,), len(x))])
        numbers = torch.arange(self.num_experts, device=x.device)
        is_of = x.new_empty(len(x), self.num_experts)
        torch.eq(dispatch.expert.unsqueeze(1), numbers, out=is_of)
        rows, where = dispatch.order, dispatch.rows_of_tokens()
        hidden = self._hidden(self._grouped_map(Permuted.apply(x, rows, where), "fc1", is_of, ends))
        return Permuted.apply(self._grouped_map(hidden, "fc2", is_of, ends), where, rows)

    def _placed(self, x: Tensor, dispatch: Dispatch, weights: Optional[Tensor]) -> Tensor:
        assert dispatch.place is not None and dispatch.capacity is not None and weights is not None
        places = Placed.apply(x, dispatch.place, self.num_experts, dispatch.capacity)
        hidden = self._hidden(PlacedLinear.apply(places, *self._maps("fc1", x.dtype), True))
        return Combined.apply(PlacedLinear.apply(hidden, *self._maps("fc2", x.dtype), False), weights, dispatch.place)

    def _maps(self, name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return weights and biases of one of the two maps, and copies of both in a precision."""
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return weight, bias, short_copy(weight, dtype), short_copy(bias, dtype)

    def _grouped_map(self, x: Tensor, name: str, is_of: Tensor, ends: Tensor) -> Tensor:
        return GroupedLinear.apply(x, *self._maps(name, x.dtype), is_of, ends)

    def _padded(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        num_experts, model_dim = self.num_experts, x.size(1)
        capacity = dispatch.capacity if dispatch.capacity is not None else max(1, int(dispatch.counts.max()))
        slot = dispatch.slots(capacity)
        slots = x.new_zeros(num_experts * capacity + 1, model_dim).index_copy(0, slot, x[dispatch.order])
        rows = slots[:-1].view(num_experts, capacity, model_dim)
        hidden = self._hidden(torch.baddbmm(self.fc1_bias[:, None], rows, self.fc1_weight.transpose(1, 2)))
        out = torch.baddbmm(self.fc2_bias[:, None], hidden, self.fc2_weight.transpose(1, 2)).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, model_dim)])
        return out.index_select(0, slot[dispatch.rows_of_tokens()])

    def extra_repr(self) -> str:
        """Show E, M and F."""
        num_experts, ffn_dim, model_dim = self.fc1_weight.shape
        return f"num_experts={num_experts}, model_dim={model_dim}, ffn_dim={ffn_dim}"


def _dtype(x: Tensor) -> torch.dtype:
    """Return the precision in which rows are computed."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@functools.cache
def _groups_without_wait(device: torch.device) -> bool:
    """Return whether ``grouped_mm`` takes its offsets from the device: before sm_90 torch reads them on the host."""
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device) >= (9, 0)


class Permuted(torch.autograd.Function):
    """Rows in another order; their gradients go back by the inverse order, where autograd would sort to add them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """Return ``x[index]``."""
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``."""
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class Weighted(torch.autograd.Function):
    """Rows times the gate's weight of each, zero where nobody takes a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, is_taken: Optional[Tensor]) -> Tensor:
        """Return (S, M) for ``x`` (S, M), fp32 ``weights`` (S,) and ``is_taken`` (S,) bool; None: all are taken."""
        if is_taken is None:
            here = weights.to(x.dtype)
        else:
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


class GroupedLinear(torch.autograd.Function):
    """Apply expert e's map to its rows, all experts in one kernel.

    Biases are added, and get their gradients, by a product with ones and zeros; rows of ``bias[expert]`` would be a
    tensor of their own, and autograd would sort them to add them up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, short_weight: Tensor, short_bias: Tensor, *rows: Tensor
    ) -> Tensor:
        """Compute ``x @ weight[e].T + bias[e]``.

        Args:
            ctx: autograd's context.
            x: (S, I) rows sorted by expert.
            weight: (E, O, I), which gets the gradient.
            bias: (E, O), likewise.
            short_weight: in the precision of ``x``, in which it is computed.
            short_bias: likewise.
            rows: (S, E), one where the row is the expert's, else zero, in the precision of ``x``; and the end of each
                expert's rows, (E,) int32.

        Returns:
            (S, O).
        """
        is_of, ends = rows
        ctx.save_for_backward(x, short_weight, is_of, ends)
        ctx.dtype = weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.grouped_mm(x, short_weight.transpose(1, 2), offs=ends).addmm_(is_of, short_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of rows, weights and biases."""
        x, weight, is_of, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_weight = F.grouped_mm(grad.t(), x, offs=ends)
        grad_x = F.grouped_mm(grad, weight, offs=ends)
        return grad_x, grad_weight.to(ctx.dtype), product(is_of.t(), grad, ctx.dtype), None, None, None, None


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
