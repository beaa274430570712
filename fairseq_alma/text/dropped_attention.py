"""Causal attention with dropout of its weights, for training in bf16 on a CPU.

torch has a fused kernel for a CPU only without dropout; with it, `scaled_dot_product_attention` takes a dozen passes
over all B x H x T x T weights, future positions included. Here blocks of queries see only the keys up to their own end,
and each pass writes where the last one read.

Letters: N sequences times heads, T positions, D dimension of a head, Q queries of a block, K keys up to its end.
"""

from typing import Any, Iterator, Optional

import torch
from torch import Tensor

from fairseq_alma.text.dropout import LEVELS, keep_bits, kept_levels

BLOCK = 256  # queries


class DroppedCausalAttention(torch.autograd.Function):
    """``dropout(softmax(query @ key.T / sqrt(D) + causal mask)) @ value``."""

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
