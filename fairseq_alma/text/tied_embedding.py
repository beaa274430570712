"""Embeddings that the output layer shares, with one gradient for both on a GPU.

Autograd makes a gradient of the lookup as large as the whole matrix, and another tensor for the sum of the two: with a
vocabulary of 50,000 half a gigabyte a batch goes through memory for four thousand rows.

Letters: B sequences, T positions, M model dim, V vocabulary size, P positions that have an embedding.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


class TiedEmbedding(torch.autograd.Function):
    """Embeddings of tokens and positions, and those of all tokens, which the output layer takes.

    The gradient of the tokens is added to that of the output layer, where autograd would make another as large.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor, first: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Embed tokens, none of which is padding.

        Args:
            ctx: autograd's context.
            tokens: (B, T).
            weight: (V, M), of tokens.
            positions: (P, M), of positions.
            first: the row of the first position.
            scale: what embeddings of tokens are multiplied with.

        Returns:
            (B, T, M), and ``weight``.
        """
        ctx.save_for_backward(tokens)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.scale = (weight.shape, positions.shape), scale
        ctx.rows = slice(first, first + tokens.size(1))
        return torch.add(positions[ctx.rows], F.embedding(tokens, weight), alpha=scale), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of both embeddings."""
        (tokens,) = ctx.saved_tensors
        grad, grad_weight = grads
        assert grad is not None
        of_tokens, of_positions = ctx.sizes
        grad_weight = grad.new_zeros(of_tokens) if grad_weight is None else grad_weight
        grad_positions = grad.new_zeros(of_positions)
        torch.sum(grad, 0, out=grad_positions[ctx.rows])
        grad_weight.index_add_(0, tokens.flatten(), grad.flatten(0, 1), alpha=ctx.scale)
        return None, grad_weight, grad_positions, None, None
