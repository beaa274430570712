"""Cross entropy of a projection onto a large vocabulary, chunk by chunk.

The fp32 logits of a whole batch (32,768 tokens, vocabulary size 50,000: 6.6 GB) would be the largest thing in memory.
Here only one chunk of them lives at a time; its gradient is taken at once, so nothing is computed twice.
PyTorch 2.13 brings ``linear_cross_entropy`` for this; older versions, which we support, do not.

Letters: S tokens, M model dim, V vocabulary size.
"""

from typing import Any, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 2**28  # of the (chunk x V) fp32 logits on a GPU: 1 GiB
CHUNK_ELEMENTS_CPU = 2**25  # 128 MiB; smaller chunks were slower on two cores


class LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of ``softmax(features @ weight.T)``."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        """Compute the sum and, where gradients are wanted, the gradients.

        Args:
            ctx: autograd's context.
            features: (S, M).
            weight: (V, M), same precision.
            target: (S,) int64.
            ignore_index: target value of tokens that do not count.

        Returns:
            Scalar fp32, in nats.
        """
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=torch.float32, device=features.device)
        if needs_grad:
            grad_features = torch.empty_like(features)
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(features, weight):
            log_probs = F.log_softmax(F.linear(features[rows], weight), dim=1, dtype=torch.float32)
            keep = target[rows] != ignore_index
            index = target[rows].masked_fill(~keep, 0).unsqueeze(1)
            total -= (log_probs.gather(1, index).squeeze(1) * keep).sum()
            if needs_grad:
                # d loss / d logits = softmax - one-hot, zero for ignored tokens
                grad_logits = log_probs.exp_()
                grad_logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
                grad_logits = grad_logits.mul_(keep.unsqueeze(1)).to(weight.dtype)
                grad_features[rows] = grad_logits @ weight
                grad_weight += grad_logits.t() @ features[rows]
        if needs_grad:
            ctx.save_for_backward(grad_features, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients that forward has computed."""
        grad_features, grad_weight = ctx.saved_tensors
        (scale,) = grads
        return grad_features * scale.to(grad_features.dtype), grad_weight * scale.to(grad_weight.dtype), None, None


def linear_cross_entropy(features: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the sum over tokens of the cross entropy of ``softmax(features @ weight.T)``.

    Args:
        features: (S, M).
        weight: (V, M).
        target: (S,) int64.
        ignore_index: target value of tokens that do not count.

    Returns:
        Scalar fp32, in nats.
    """
    return LinearCrossEntropy.apply(features, weight, target, ignore_index)


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of every token, without gradients: (S, M), (V, M), (S,) to (S,) fp32 in nats."""
    losses = torch.empty(len(features), dtype=torch.float32, device=features.device)
    for rows in _chunks(features, weight):
        losses[rows] = F.cross_entropy(F.linear(features[rows], weight).float(), target[rows], reduction="none")
    return losses


def _chunks(features: Tensor, weight: Tensor) -> Iterator[slice]:
    elements = CHUNK_ELEMENTS_CPU if features.device.type == "cpu" else CHUNK_ELEMENTS
    size = max(1, elements // len(weight))
    for start in range(0, len(features), size):
        yield slice(start, start + size)
