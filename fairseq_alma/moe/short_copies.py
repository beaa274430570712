"""Products in autocast's precision on a GPU, with copies of weights that are made once an update, not once a batch.

Under autocast weights are fp32, and each batch casts them anew, and its gradients back. The batches of one update share
what they cast, as long as a training says which update it is at (`batch_of_update`): optimizers change ``weight.data``,
which no counter of torch's notices. The copies take the memory of autocast's own.
"""

import contextlib
from typing import Any, Callable, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")
"""Whether products of torch's write another precision than they read, since 2.8."""
_UPDATE: list[Optional[int]] = [None]
_KEPT: Any = WeakIdKeyDictionary()


@contextlib.contextmanager
def batch_of_update(update: Optional[int]) -> Iterator[None]:
    """Let the block be a batch of an update, by its number; no weight changes between those of one update."""
    before, _UPDATE[0] = _UPDATE[0], update
    try:
        yield
    finally:
        _UPDATE[0] = before


def short_dtype(x: Tensor) -> Optional[torch.dtype]:
    """Return the precision of products under autocast on a GPU; None elsewhere, and where torch.compile fuses them."""
    if torch.compiler.is_compiling() or not x.is_cuda or not torch.is_autocast_enabled("cuda"):
        return None
    return torch.get_autocast_dtype("cuda")


def short_copy(weight: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """Return a weight in a precision, without a gradient.

    Args:
        weight: (O, …).
        dtype: the precision.
        terms: how many tensors, whose sum is nearer and nearer to the weight; they stand one below the other.
    """
    if torch.compiler.is_compiling() or weight.dtype == dtype:  # which would have a graph for each update
        return _rounded(weight.detach(), dtype, terms)
    owner: Any = weight._base if weight._is_view() else weight  # what `TiedEmbedding` returns is made anew each batch
    return _once_an_update(owner, (dtype, terms, weight._version), lambda: _rounded(weight.detach(), dtype, terms))


def _once_an_update(owner: Tensor, state: tuple, make: Callable[[], Tensor]) -> Tensor:
    """Return what is made of a weight, and kept with it until the next update, or until its state is another."""
    if _UPDATE[0] is None:
        return make()
    state = (_UPDATE[0], *state)
    kept = _KEPT.get(owner)
    if kept is None or kept[0] != state:
        kept = _KEPT[owner] = (state, make())
    return kept[1]


def _rounded(weight: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    parts = [weight.to(dtype)]
    for _ in range(terms - 1):
        weight = weight - parts[-1]
        parts.append(weight.to(dtype))
    return parts[0] if terms == 1 else torch.cat(parts)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b`` in a precision, which the kernel of a GPU writes by itself."""
    if a.is_cuda and a.dtype != dtype and HAS_OUT_DTYPE:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


class Linear(nn.Linear):
    """A linear map; under autocast on a GPU by `ShortLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, I) to (…, O)."""
        dtype = short_dtype(x)
        if dtype is None:
            return super().forward(x)
        copies = (short_copy(self.weight, dtype), short_copy(self.bias, dtype))
        return ShortLinear.apply(x, self.weight, self.bias, *copies)


class ShortLinear(torch.autograd.Function):
    """A linear map of rows in a short precision, whose weights get gradients in their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, short_weight: Tensor, short_bias: Tensor) -> Tensor:
        """Compute ``x @ weight.T + bias``.

        Args:
            ctx: autograd's context.
            x: (…, I), in any precision, which its gradient has too: no cast of its own.
            weight: (O, I), which gets the gradient.
            bias: (O,), likewise.
            short_weight: in the precision in which it is computed.
            short_bias: likewise.

        Returns:
            (…, O), in the short precision.
        """
        ctx.dtype, ctx.dtype_x = weight.dtype, x.dtype
        x = x.to(short_weight.dtype)
        ctx.save_for_backward(x, short_weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, short_weight, short_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of rows, weight and bias."""
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.size(0))
        grad_weight = product(grad.t(), x.reshape(-1, weight.size(1)), ctx.dtype)
        grad_x = product(grad, weight, ctx.dtype_x).view_as(x)
        return grad_x, grad_weight, grad.sum(0, dtype=ctx.dtype), None, None


class ShortVectors(torch.autograd.Function):
    """Copies of parameters of one shape in a short precision, whose gradients are cast back all at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, factor: float, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return a copy of each times the factor."""
        ctx.dtype, ctx.factor = vectors[0].dtype, factor
        state = (dtype, factor, *(each._version for each in vectors))
        return _once_an_update(vectors[0], state, lambda: _times(torch.stack(vectors), factor).to(dtype)).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Return the gradients of the parameters."""
        return None, None, *_times(torch.stack(grads).to(ctx.dtype), ctx.factor).unbind()


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


class ShortNorm(torch.autograd.Function):
    """A residual and its layer norm, both in a short precision, whose gradients are added up in it.

    The kernel computes in fp32, and a linear map reads a norm in the short precision whatever it was written in.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x`` and its norm.

        Args:
            ctx: autograd's context.
            x: (…, M).
            weight: (M,), in the precision of ``x``, as CUDA's kernel asks for.
            bias: (M,), likewise.
            eps: what the variance is added to.
        """
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of residual, weight and bias."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        of_residual, of_norm = grads
        given = (of_norm, x, weight.shape, mean, rstd, weight, bias, [True] * 3)
        grad, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(*given)
        return grad if of_residual is None else grad.add_(of_residual), grad_weight, grad_bias, None


class ShortGate(torch.autograd.Function):
    """Logits of a gate for rows in a short precision, to the digits of fp32, in which its weights are.

    A weight is the sum of three in bf16, and a product of two numbers in bf16 is exact in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows, (S, I), whose gradients are added up here, and logits (S, R) in the weight's precision."""
        terms = short_copy(weight, x.dtype, 3)
        ctx.save_for_backward(x, terms)
        logits = product(x, terms.t(), weight.dtype)
        return x.view_as(x), logits.view(len(x), 3, len(weight)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of rows and weight."""
        x, terms = ctx.saved_tensors
        of_rows, of_logits = grads
        short = of_logits.to(x.dtype)
        grad = torch.addmm(of_rows, short, terms[: short.size(1)])
        return grad, product(short.t(), x, of_logits.dtype)
