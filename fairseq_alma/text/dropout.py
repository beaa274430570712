"""Dropout, with cheaper random numbers where training computes in bf16 on a CPU.

With products in bf16, torch's Bernoulli numbers (6 ns each) take longer than the attention that they thin out. Here the
generator's 64-bit words are cut into four numbers of 15 bits each (0.8 ns), so that a probability is met to 1/32768.
In fp32 and on a GPU dropout is torch's, digit for digit.
"""

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Size, Tensor

LEVELS = 2**15


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Set values to zero at random, and scale the others so that the expectation stays.

    Args:
        x: any shape.
        probability: of dropping a value, 0 to 1.
        training: False: return ``x``.

    Returns:
        The shape and precision of ``x``.
    """
    if training and uses_short_numbers(x, probability):
        return _Dropout.apply(x, probability)
    return F.dropout(x, probability, training)


def uses_short_numbers(x: Tensor, probability: float) -> bool:
    """Return whether dropout of this tensor draws the cheaper numbers, here and now."""
    in_bf16 = x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    return in_bf16 and 0 < kept_levels(probability) < LEVELS


def kept_levels(probability: float) -> int:
    """Return how many of the 32768 numbers mean that a value is kept."""
    return round((1 - probability) * LEVELS)


def random_15_bits(shape: Size) -> Tensor:
    """Return int16 numbers from 0 to 32767 of torch's generator."""
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.long).random_(-(2**63), None)
    return words.view(torch.int16)[:count].view(shape).bitwise_and_(LEVELS - 1)


def keep_bits(shape: Size, probability: float) -> Tensor:
    """Return int16 numbers whose bits are all one where a value is kept, all zero where it is dropped."""
    return random_15_bits(shape).sub_(kept_levels(probability)).bitwise_right_shift_(15)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        """Return what is left of ``x``."""
        kept = kept_levels(probability)
        is_dropped = random_15_bits(x.shape) >= kept
        ctx.save_for_backward(is_dropped)
        ctx.scale = LEVELS / kept
        return x.masked_fill(is_dropped, 0.0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Drop and scale the gradient in the same places."""
        (is_dropped,) = ctx.saved_tensors
        return grads[0].masked_fill(is_dropped, 0.0).mul_(ctx.scale), None


def draw_kept(x: Tensor, number: int, probability: float, training: bool) -> Sequence[Optional[Tensor]]:
    """Draw, on a GPU and at once, which values of some tensors like one are kept, for `AddKept`.

    Args:
        x: any shape.
        number: of tensors.
        probability: of dropping a value.
        training: False: nothing is dropped.

    Returns:
        So many bool tensors of the shape of ``x``; or None, where `dropout` is to be called.
    """
    if not (training and x.is_cuda and 0 < probability < 1):
        return [None] * number
    return torch.empty(number, *x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - probability).unbind()


class AddKept(torch.autograd.Function):
    """A residual plus a branch with dropout, each way in one pass and without a cast, whatever their precisions."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, kept: Tensor, zero: Tensor, factor: float) -> Tensor:
        """Return ``residual + factor * branch`` where ``kept``, and ``residual`` elsewhere; all of one shape."""
        ctx.save_for_backward(kept, zero)
        ctx.factor, ctx.dtype = factor, branch.dtype
        with torch.autocast(branch.device.type, enabled=False):  # which would copy the branch
            return torch.addcmul(residual, branch, kept, value=factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of residual and branch."""
        kept, zero = ctx.saved_tensors
        (grad,) = grads
        out = torch.empty_like(grad, dtype=ctx.dtype)
        return grad, torch.addcmul(zero, grad, kept, value=ctx.factor, out=out), None, None, None
