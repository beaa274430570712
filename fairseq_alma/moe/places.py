"""Experts by places, on a GPU with a capacity: one batched product for all experts, which a GPU has kernels for.

Each expert has C places for tokens and a spare one, where those lie that nobody takes. The shapes are those of the
capacity, so nothing asks the device; weights' gradients come out of the product in fp32, and biases go into it.

Letters: S tokens, E experts, C capacity, M model dim, I input and O output features of one map.
"""

from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.moe.short_copies import HAS_OUT_DTYPE


def places_of_tokens(
    order: Tensor, expert: Tensor, starts: Tensor, limit: Union[int, Tensor], capacity: int, numbers: Tensor
) -> Tensor:
    """Return the place of each token among E x (C + 1), (S,) int64; the last of an expert is that of many.

    Args:
        order: as in `Dispatch`; ``expert``, ``starts``, ``limit`` likewise.
        expert: of each row.
        starts: the first row of each expert, and of padding.
        limit: the most tokens that an expert takes; a tensor where some rows may be padding.
        capacity: C, a bound on ``limit``.
        numbers: those from 0 to S - 1, or more.
    """
    position = numbers[: len(order)] - starts[expert]
    if isinstance(limit, int):
        position = position.clamp_(max=capacity)
    else:
        num_experts = len(starts) - 1
        position = position.masked_fill_((position >= limit) | (expert == num_experts), capacity)
        expert = expert.clamp(max=num_experts - 1)
    place = torch.add(position, expert, alpha=capacity + 1)
    return torch.empty_like(order).scatter_(0, order, place)


def _bmm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b`` of batches in a precision, which the kernel of a GPU writes by itself."""
    if a.is_cuda and a.dtype != dtype and HAS_OUT_DTYPE:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a, b).to(dtype)


class Placed(torch.autograd.Function):
    """Tokens to places; a spare place has any of those that nobody takes, and a place that nobody got is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, num_experts: int, capacity: int) -> Tensor:
        """Return (E, C + 1, M) for (S, M) tokens and their places, (S,)."""
        ctx.save_for_backward(place)
        places = x.new_zeros(num_experts * (capacity + 1), x.size(1)).index_copy_(0, place, x)
        return places.view(num_experts, capacity + 1, x.size(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Return the gradient of the tokens, where that of spare places is zero."""
        (place,) = ctx.saved_tensors
        return grads[0].flatten(0, 1).index_select(0, place), None, None, None


class Combined(torch.autograd.Function):
    """Places back to tokens, each times the gate's weight."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        """Return (S, M) for (E, C + 1, M), whose spare places are zero, (S,) fp32 weights and (S,) places."""
        x = places.flatten(0, 1).index_select(0, place)
        ctx.save_for_backward(x, weights, place)
        ctx.shape = places.shape
        return torch.mul(x, weights.unsqueeze(1), out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of places, of which spare ones have any, and of weights."""
        x, weights, place = ctx.saved_tensors
        (grad,) = grads
        rows = torch.mul(grad, weights.unsqueeze(1), out=torch.empty_like(x))
        grad_places = x.new_zeros(ctx.shape.numel() // x.size(1), x.size(1)).index_copy_(0, place, rows)
        return grad_places.view(ctx.shape), _bmm(grad.unsqueeze(1), x.unsqueeze(2), weights.dtype).flatten(), None


class PlacedLinear(torch.autograd.Function):
    """Apply expert e's map to its places: the first map leaves the spare one out, the second makes a zero of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, short_weight: Tensor, short_bias: Tensor, is_first: bool
    ) -> Tensor:
        """Compute ``x[e] @ weight[e].T + bias[e]``.

        Args:
            ctx: autograd's context.
            x: (E, C + 1, I) of the first map, (E, C, I) of the second.
            weight: (E, O, I), which gets the gradient.
            bias: (E, O), likewise.
            short_weight: in the precision of ``x``, in which it is computed.
            short_bias: likewise.
            is_first: which of the two.

        Returns:
            (E, C, O) of the first map, (E, C + 1, O) of the second.
        """
        ctx.save_for_backward(x, short_weight)
        ctx.is_first, ctx.dtype = is_first, weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            inputs = (short_bias.unsqueeze(1), x[:, :-1] if is_first else x, short_weight.transpose(1, 2))
            return torch.baddbmm(*inputs) if is_first else with_spare(torch.baddbmm, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of places, weights and biases."""
        x, weight = ctx.saved_tensors
        grad, x = (grads[0], x[:, :-1]) if ctx.is_first else (grads[0][:, :-1], x)
        grad_weight = _bmm(grad.transpose(1, 2), x, ctx.dtype)
        grad_bias = grad.sum(1, dtype=ctx.dtype)
        grad_x = with_spare(torch.bmm, (grad, weight)) if ctx.is_first else torch.bmm(grad, weight)
        return grad_x, grad_weight, grad_bias, None, None, None


def with_spare(compute: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Compute a product of batches into all places but the spare ones, which are zero."""
    if torch.compiler.is_compiling():  # which fuses it, and takes no `out` with gaps
        return F.pad(compute(*inputs), (0, 0, 0, 1))
    rows, columns = inputs[-2], inputs[-1]
    out = rows.new_empty(rows.size(0), rows.size(1) + 1, columns.size(2))
    compute(*inputs, out=out[:, :-1])
    out[:, -1].zero_()
    return out
