"""Products in autocast's precision on a GPU, with copies of weights that are made once an update, not once a batch.

Under autocast weights are fp32, and each batch casts them anew, and its gradients back. The batches of one update share
what they cast, as long as a training says which update it is at (`batch_of_update`): optimizers change ``weight.data``,
which no counter of torch's notices. The copies take the memory of autocast's own.
"""

import contextlib
from typing import Any, Iterator, Optional

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


def short_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a precision, without a gradient."""
    if weight.dtype == dtype or _UPDATE[0] is None:
        return weight.detach().to(dtype)
    state = (_UPDATE[0], dtype, weight._version)
    kept = _KEPT.get(weight)
    if kept is None or kept[0] != state:
        kept = _KEPT[weight] = (state, weight.detach().to(dtype))
    return kept[1]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b`` in a precision, which the kernel of a GPU writes by itself."""
    if a.is_cuda and a.dtype != dtype and HAS_OUT_DTYPE:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


class Linear(nn.Linear):
    """A linear map; under autocast on a GPU by `ShortLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, I) to (…, O)."""
        if not x.is_cuda or not torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling():
            return super().forward(x)
        dtype = torch.get_autocast_dtype("cuda")
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


class WithShort(torch.autograd.Function):
    """A tensor and a copy in a short precision, whose gradients are added up without a cast between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``x`` and the copy."""
        return x.view_as(x), x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients, in the precision of ``x``."""
        return torch.add(*grads), None
