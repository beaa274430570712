"""Cross entropy of a linear output layer with a large vocabulary, computed in chunks of tokens to save memory.

With a vocabulary of 50,000, the fp32 logits of a batch of 32,768 tokens would take 6.6 GB.

Letters: S tokens, M model dim, V vocabulary size.
"""

from typing import Any, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 2**25
"""Maximum number of logits of a chunk (tokens x V), 128 MiB in fp32. Smaller chunks are slower, because each chunk
updates the complete weight gradient."""


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the cross entropy of ``softmax(features @ weight.T + bias)``, summed over tokens.

    This function replaces ``linear_cross_entropy`` of torch 2.13, which rounds the sum of a batch to bf16 in autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, ignore_index: int
    ) -> Tensor:
        """Return the loss, and save the gradients for `backward`; see `linear_cross_entropy` for the arguments."""
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0).unsqueeze(1)
        losses, grad_features, grad_weight = [], torch.empty_like(features), None
        for rows in _chunks(features, weight):
            logits = F.linear(features[rows], weight, bias)
            log_probs = logits.float()
            torch.log_softmax(log_probs, dim=1, out=log_probs)  # in place: allocation takes as long as the softmax
            losses.append(log_probs.gather(1, index[rows]).squeeze(1).masked_fill(ignored[rows], 0.0).sum())
            # d loss / d logits = softmax - one-hot. To mask ignored tokens, zero the smaller factor of each product.
            log_probs.exp_().scatter_add_(1, index[rows], torch.full_like(log_probs[:, :1], -1.0))
            grad_logits, mask = log_probs.to(logits.dtype), ignored[rows].unsqueeze(1)
            grad_features[rows] = (grad_logits @ weight).masked_fill_(mask, 0.0)
            product = grad_logits.t() @ features[rows].masked_fill(mask, 0.0)
            grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
        ctx.save_for_backward(grad_features, grad_weight)
        return -torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Return the gradients from `forward`, multiplied by the incoming gradient."""
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * grads[0], grad_weight * grads[0], None, None, None


def linear_cross_entropy(
    features: Tensor, weight: Tensor, target: Tensor, ignore_index: int, bias: Optional[Tensor] = None
) -> Tensor:
    """Return the sum over tokens of the cross entropy of ``softmax(features @ weight.T + bias)``.

    Features are (S, M), weights (V, M), targets (S,) int64. The sum excludes tokens with the target ``ignore_index``.
    The sum is in fp32 and in nats. The (V,) bias has no gradient.
    """
    if not torch.is_grad_enabled():
        return token_losses(features, weight, target, bias).masked_fill(target == ignore_index, 0.0).sum()
    return LinearCrossEntropy.apply(features, weight, bias, target, ignore_index)


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return the cross entropy of each token, (S,) fp32 in nats; see `linear_cross_entropy` for the arguments."""
    losses = torch.empty(len(features), dtype=torch.float32, device=features.device)
    for rows in _chunks(features, weight):
        losses[rows] = F.cross_entropy(F.linear(features[rows], weight, bias).float(), target[rows], reduction="none")
    return losses


def _chunks(features: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // len(weight))
    for start in range(0, len(features), size):
        yield slice(start, start + size)
