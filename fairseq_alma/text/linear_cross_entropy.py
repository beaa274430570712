"""Cross entropy of a projection onto a large vocabulary, chunk by chunk.

The fp32 logits of a whole batch (32,768 tokens, vocabulary size 50,000: 6.6 GB) would be the largest thing in memory.
Here only one chunk of them lives at a time; its gradient is taken at once, so nothing is computed twice.
PyTorch 2.13 brings ``linear_cross_entropy`` for this; older versions, which we support, do not.

Letters: S tokens, M model dim, V vocabulary size.
"""

import functools
from typing import Any, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.moe.short_copies import product, short_copy

CHUNK_ELEMENTS = 2**28  # of the (chunk x V) logits on a GPU: 1 GiB in fp32, half in bf16
CHUNK_ELEMENTS_CPU = 2**25  # 128 MiB; smaller chunks were slower on two cores
CHUNK_ELEMENTS_BF16 = 2**27  # of bf16 logits on a CPU: 256 MiB; each chunk reads and writes the weights' whole gradient
CACHED_ELEMENTS = 2**20  # of fp32 logits, for each core: 4 MiB

SumAndGradients = tuple[Tensor, Optional[Tensor], Optional[Tensor]]


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
            ignore_index: target value of tokens that do not count; -1: all count.

        Returns:
            Scalar fp32, in nats.
        """
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        compute = _by_chunks
        if weight.device.type == "cpu" and _product_dtype(weight) == torch.bfloat16:
            compute = _in_bf16_on_a_cpu
        total, grad_features, grad_weight = compute(features, weight, target, ignore_index, needs_grad)
        if needs_grad:
            ctx.save_for_backward(grad_features, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients that forward has computed."""
        grad_features, grad_weight = ctx.saved_tensors
        (scale,) = grads
        if scale.device.type == "cpu" and scale == 1:  # asking a GPU would take longer
            return grad_features, grad_weight, None, None
        return grad_features * scale.to(grad_features.dtype), grad_weight * scale.to(grad_weight.dtype), None, None


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Return the precision of products."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _by_chunks(
    features: Tensor, weight: Tensor, target: Tensor, ignore_index: int, needs_grad: bool
) -> SumAndGradients:
    """Compute a chunk of the logits, its loss and its gradients, then the next."""
    total = torch.zeros((), dtype=torch.float32, device=features.device)
    grad_features, grad_weight = torch.empty_like(features), None
    for rows in _chunks(features, weight):
        log_probs = _log_softmax(F.linear(features[rows], weight))
        is_ignored = target[rows] == ignore_index
        index = target[rows].masked_fill(is_ignored, 0).unsqueeze(1)
        total -= (log_probs.gather(1, index).squeeze(1) * ~is_ignored).sum()
        if needs_grad:
            # d loss / d logits = softmax - one-hot, zero for ignored tokens
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
            grad_logits = _without(grad_logits, is_ignored).to(weight.dtype)
            grad_features[rows] = grad_logits @ weight
            product = grad_logits.t() @ features[rows]
            grad_weight = product.float() if grad_weight is None else grad_weight.add_(product)
    return total, grad_features, None if grad_weight is None else grad_weight.to(weight.dtype)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return fp32 log-probabilities, in place where there is room for them: on a CPU fresh memory costs as much."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.log_softmax(logits, dim=1, out=logits)
    return F.log_softmax(logits, dim=1, dtype=torch.float32)


def _without(grad_logits: Tensor, is_ignored: Tensor) -> Tensor:
    """Set the rows of ignored tokens to zero."""
    if grad_logits.device.type == "cpu":  # where to ask which they are costs less than to go through all
        return grad_logits.index_fill_(0, is_ignored.nonzero().squeeze(1), 0.0)
    return grad_logits.mul_(~is_ignored.unsqueeze(1))


def _in_bf16_on_a_cpu(
    features: Tensor, weight: Tensor, target: Tensor, ignore_index: int, needs_grad: bool
) -> SumAndGradients:
    """Compute the same with one copy of the weights and one pass of exponentials, which stays in the cache.

    Logits are bf16, as autocast would have them, and become their own gradients; softmax and losses are fp32.
    """
    grad_features, grad_weight = torch.empty_like(features), None
    with torch.autocast("cpu", enabled=False):
        short_features, short_weight = features.to(torch.bfloat16), weight.to(torch.bfloat16)
        is_ignored = target == ignore_index
        index = target.masked_fill(is_ignored, 0).unsqueeze(1)
        losses = torch.empty(len(features))
        for rows in _chunks(features, weight, CHUNK_ELEMENTS_BF16):
            logits = torch.mm(short_features[rows], short_weight.t())
            losses[rows] = _losses_and_gradients(logits, index[rows])
            if needs_grad:
                grad_logits = _without(logits, is_ignored[rows])
                grad_features[rows] = grad_logits @ short_weight
                product = grad_logits.t() @ short_features[rows]
                grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
    return losses.masked_fill_(is_ignored, 0.0).sum(), grad_features, grad_weight


def _losses_and_gradients(logits: Tensor, index: Tensor) -> Tensor:
    """Write d loss / d logits = softmax - one-hot over bf16 logits.

    Args:
        logits: (S, V), overwritten.
        index: (S, 1), the right tokens.

    Returns:
        (S,) fp32: the losses.
    """
    losses = torch.empty(len(logits))
    size = max(1, CACHED_ELEMENTS * torch.get_num_threads() // logits.size(1))
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        exact = logits[rows].float()
        probs = torch.softmax(exact, dim=1)
        # log of the sum of exponentials: the largest logit less the logarithm of its probability, which is never zero
        log_sums = exact.amax(dim=1) - probs.amax(dim=1).log()
        losses[rows] = log_sums - exact.gather(1, index[rows]).squeeze(1)
        logits[rows] = probs.scatter_add_(1, index[rows], torch.full_like(index[rows], -1, dtype=torch.float32))
    return losses


class InShortLogits(torch.autograd.Function):
    """The same with logits and their gradients in bf16, which is a quarter of what fp32 moves through a GPU's memory.

    A softmax is computed in fp32 and rounded once, also for the loss; that of a token is at most 87 nats, as what is
    below fp32 counts as its smallest number. Where one chunk is all, its two products wait for the backward pass, which
    scales the short side of them rather than the weights' whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        """Compute the sum; arguments and result as in `LinearCrossEntropy`."""
        sums, found = [], []
        with torch.autocast(features.device.type, enabled=False):
            short = features.to(torch.bfloat16), short_copy(weight, torch.bfloat16)
            is_ignored = None if ignore_index < 0 else target == ignore_index
            index = (target if is_ignored is None else target.masked_fill(is_ignored, 0)).unsqueeze(1)
            chunks = list(_chunks(features, weight))
            for rows in chunks:
                given = short[0][rows]
                probs = torch.softmax(torch.mm(given, short[1].t()), dim=1)
                of_target = probs.gather(1, index[rows])
                log_probs = of_target.float().clamp_(min=torch.finfo(torch.float32).tiny).log_()
                # d loss / d logits = softmax - one-hot; what is ignored is left out of the short side of both products
                probs.scatter_(1, index[rows], -1.0, reduce="add")
                ignored = None if is_ignored is None else is_ignored[rows].unsqueeze(1)
                sums.append((log_probs if ignored is None else log_probs.masked_fill(ignored, 0.0)).sum())
                parts = (probs, given, ignored)
                found.append(parts if len(chunks) == 1 else _products(*parts, short[1], features.dtype, weight.dtype))
        ctx.dtypes = features.dtype, weight.dtype
        if len(chunks) == 1:
            ctx.save_for_backward(*found[0], short[1])
        else:
            grad_features, grad_weights = zip(*found, strict=True)
            ctx.save_for_backward(torch.cat(grad_features), functools.reduce(Tensor.add_, grad_weights))
        return -(sums[0] if len(sums) == 1 else torch.stack(sums).sum())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of features and weights."""
        saved, (scale,) = ctx.saved_tensors, grads
        if len(saved) == 2:
            grad_features, grad_weight = saved
            return grad_features * scale.to(grad_features.dtype), grad_weight * scale.to(grad_weight.dtype), None, None
        probs, given, ignored, weight = saved
        grad_features, grad_weight = _products(probs, given * scale, ignored, weight, *ctx.dtypes)
        return grad_features.mul_(scale), grad_weight, None, None


def _products(
    grad_logits: Tensor,
    given: Tensor,
    ignored: Optional[Tensor],
    weight: Tensor,
    dtype: torch.dtype,
    dtype_of_weight: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of features and weights; of bf16 logits, features and weights, in other precisions."""
    grad_features = product(grad_logits, weight, dtype)
    if ignored is not None:
        given = given.masked_fill(ignored, 0.0)
        grad_features.masked_fill_(ignored, 0.0)
    return grad_features, product(grad_logits.t(), given, dtype_of_weight)


def linear_cross_entropy(features: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the sum over tokens of the cross entropy of ``softmax(features @ weight.T)``.

    Args:
        features: (S, M).
        weight: (V, M).
        target: (S,) int64.
        ignore_index: target value of tokens that do not count; -1: all count.

    Returns:
        Scalar fp32, in nats.
    """
    return _best(features, weight).apply(features, weight, target, ignore_index)


def _best(features: Tensor, weight: Tensor) -> type[torch.autograd.Function]:
    """Return what computes it fastest here and now."""
    learns = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
    on_gpu_in_bf16 = weight.device.type != "cpu" and _product_dtype(weight) == torch.bfloat16
    return InShortLogits if on_gpu_in_bf16 and learns else LinearCrossEntropy


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of every token, without gradients: (S, M), (V, M), (S,) to (S,) fp32 in nats."""
    losses = torch.empty(len(features), dtype=torch.float32, device=features.device)
    for rows in _chunks(features, weight):
        losses[rows] = F.cross_entropy(F.linear(features[rows], weight).float(), target[rows], reduction="none")
    return losses


def _chunks(features: Tensor, weight: Tensor, elements: Optional[int] = None) -> Iterator[slice]:
    elements = elements or (CHUNK_ELEMENTS_CPU if features.device.type == "cpu" else CHUNK_ELEMENTS)
    size = max(1, elements // len(weight))
    for start in range(0, len(features), size):
        yield slice(start, start + size)
