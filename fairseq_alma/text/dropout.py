"""Dropout, also of the weights of attention, with cheaper random numbers where training computes in bf16 on a CPU.

With products in bf16, torch's Bernoulli numbers (6 ns each) take longer than the attention that they thin out. Here the
generator's 64-bit words are cut into four numbers of 15 bits each (0.8 ns), so that a probability is met to 1/32768.
In fp32 and on a GPU dropout is torch's, digit for digit.
"""

from typing import Any, Iterator, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Size, Tensor

LEVELS = 2**15
BLOCK = 256  # queries


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


class DroppedCausalAttention(torch.autograd.Function):
    """``dropout(softmax(query @ key.T / sqrt(D) + causal mask)) @ value``, for training in bf16 on a CPU.

    torch has a fused kernel for a CPU only without dropout; with it, `scaled_dot_product_attention` takes a dozen
    passes over all B x H x T x T weights, future positions included. Here blocks of queries see only the keys up to
    their own end, and each pass writes where the last one read.

    Letters: N sequences times heads, T positions, D dimension of a head, Q queries of a block, K keys up to its end.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, probability: float) -> Tensor:
        """Attend.

        Args:
            ctx: autograd's context.
            query: (…, T, D) bf16.
            key: (…, T, D) bf16.
            value: (…, T, D) bf16.
            probability: of dropping a weight, between 0 and 1.

        Returns:
            (…, T, D) bf16.
        """
        ctx.scale, ctx.keep_scale = query.size(-1) ** -0.5, LEVELS / kept_levels(probability)
        queries, keys, values = (each.reshape(-1, *each.shape[-2:]) for each in (query * ctx.scale, key, value))
        out = torch.empty_like(queries)
        blocks = []
        for start, end in _blocks(queries.size(1)):
            scores = torch.bmm(queries[:, start:end], keys[:, :end].transpose(1, 2))  # (N, Q, K)
            is_later = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            scores[:, :, start:].masked_fill_(is_later, -torch.inf)
            probs = torch.softmax(scores, dim=-1)
            bits = keep_bits(probs.shape, probability)
            out[:, start:end] = torch.bmm(_kept(probs, bits, out=scores), values[:, :end])
            blocks += [probs, bits]
        ctx.save_for_backward(queries, keys, values, *blocks)
        return out.mul_(ctx.keep_scale).view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute the gradients of queries, keys and values."""
        queries, keys, values, *blocks = ctx.saved_tensors
        grad = (grads[0] * ctx.keep_scale).reshape(queries.shape)
        grad_queries, grad_keys, grad_values = (torch.zeros_like(each) for each in (queries, keys, values))
        for number, (start, end) in enumerate(_blocks(queries.size(1))):
            probs, bits = blocks[2 * number : 2 * number + 2]
            here = grad[:, start:end]
            grad_values[:, :end] += torch.bmm(_kept(probs, bits).transpose(1, 2), here)
            grad_probs = torch.bmm(here, values[:, :end].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(_kept(grad_probs, bits, out=grad_probs), probs, -1, probs.dtype)
            grad_queries[:, start:end] = torch.bmm(grad_scores, keys[:, :end])
            grad_keys[:, :end] += torch.bmm(grad_scores.transpose(1, 2), queries[:, start:end])
        shape = grads[0].shape
        return grad_queries.mul_(ctx.scale).view(shape), grad_keys.view(shape), grad_values.view(shape), None


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Return where blocks of queries start and end; with blocks of 128, 300 gives (0, 128), (128, 256), (256, 300)."""
    for start in range(0, length, BLOCK):
        yield start, min(start + BLOCK, length)


def _kept(values: Tensor, bits: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Return bf16 values where all bits are one, and zero where they are zero, for less than a product."""
    into = None if out is None else out.view(torch.int16)
    return torch.bitwise_and(values.view(torch.int16), bits, out=into).view(values.dtype)
