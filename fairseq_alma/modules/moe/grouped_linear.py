"""One linear map per expert, applied to rows that are already sorted by expert.

A loop over the experts with hand-written gradients: each product writes straight into its slice of the stacked
gradient, where autograd would build a full-sized zero tensor per expert and add them all up.

Letters: S rows, E experts, I input and O output features.
"""

from typing import Any

import torch
from torch import Tensor


class LoopedGroupedLinear(torch.autograd.Function):
    """Apply expert e's map to its slice of the rows, one expert after the other."""

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
            (S, O).
        """
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.size(0), weight.size(1))
        for expert, rows in _slices(counts):
            torch.addmm(bias[expert], x[rows], weight[expert].t(), out=out[rows])
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
            torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
            torch.sum(grad[rows], dim=0, out=grad_bias[expert])
        return grad_x, grad_weight, grad_bias, None


def _slices(counts: list[int]) -> list[tuple[int, slice]]:
    """Return (expert, its slice of the rows); [2, 0, 3] gives (0, 0:2), (1, 2:2), (2, 2:5)."""
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    return [(expert, slice(end - count, end)) for expert, (end, count) in enumerate(zip(ends, counts, strict=True))]
