"""Optimizers ``fused_adam`` and ``muon`` for fairseq.

``fused_adam`` is AdamW with torch's fused kernel and a separate learning rate for input embeddings. Without apex,
fairseq's Adam reads all weights eleven times per update. In a mixture of experts, these reads take a tenth of the time
of an update.

``muon`` applies orthogonalized momentum to weight matrices, and AdamW to all other parameters (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks").

Models set the attribute ``param_group`` to ``embedding`` for untied input embeddings, and to ``adam`` for other
embeddings, output projections, gates and the stacked biases of experts. Parameters without the attribute are weight
matrices if they have two dimensions (three for stacked experts).

fairseq sets one learning rate for all parameter groups and numbers the optimizer state by group. Therefore each
optimizer has a single group with all parameters in the order of the model, and a learning rate factor per parameter.

Letters: N matrices, O outputs, I inputs.
"""

import ast
import logging
from argparse import ArgumentParser
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Optional, Sequence

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import opt, real
from fairseq_alma.training.stage_task import bound_options, declared

FACTOR = real(0, 1e6, above=True)
STEPS = 5
# Maximum number of elements per call of `orthogonalize`, unless one parameter has more; limits temporary memory.
MAX_BATCH_SIZE = 2**24


class FactorAdamW(torch.optim.Optimizer):
    """AdamW with a learning rate factor for each parameter.

    Args:
        params: parameters in the order of the model.
        lr: base learning rate, multiplied by the factor of each parameter.
        factor: function that returns the factor of ``lr`` for a parameter; None excludes the parameter from AdamW.
        adam: further arguments of `torch.optim.AdamW`.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, factor: Callable[[Tensor], Optional[float]], **adam: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "fused": True})  # fused: torch loads step counts to the device
        by_factor: dict[Optional[float], list[Tensor]] = {}
        for parameter in self.param_groups[0]["params"]:
            by_factor.setdefault(factor(parameter), []).append(parameter)
        self.excluded = by_factor.pop(None, [])
        self.adams = {each: torch.optim.AdamW(own, lr, fused=True, **adam) for each, own in by_factor.items()}

    def step(self, closure: Any = None) -> Any:
        for factor, adam in self.adams.items():
            adam.state, adam.param_groups[0]["lr"] = self.state, self.param_groups[0]["lr"] * (factor or 1.0)
            adam.step()


def _read_betas(given: Any) -> tuple[float, float]:
    try:
        first, second = map(float, ast.literal_eval(given) if isinstance(given, str) else given)
    except (SyntaxError, TypeError, ValueError):
        first = second = -1.0
    if not (0 <= first < 1 and 0 <= second < 1):
        raise AlmaError(f"--adam-betas {given}: expected two numbers from 0 to below 1, such as '(0.9, 0.99)'")
    return first, second


@declared
@dataclass
class FusedAdamConfig(FairseqDataclass):
    """Options of ``fused_adam``. Options with the same name as in fairseq's ``adam`` have the same meaning."""

    adam_betas: Any = field(default=(0.9, 0.999), metadata={"help": "betas of Adam"})
    adam_eps: float = opt(1e-8, "epsilon of Adam", range=real())
    weight_decay: float = opt(0.0, "weight decay", range=real())
    lr: Any = field(default=II("optimization.lr"))
    embedding_lr_factor: float = opt(
        10.0, "learning rate of untied input embeddings of alma_transformer_lm, as a multiple of --lr", range=FACTOR
    )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):
    """Fused AdamW for fairseq, on CPU or GPU.

    With ``--embedding-lr-factor 1``, only the use of epsilon differs from fairseq's Adam: torch adds epsilon to the
    square root of the second moment after bias correction, fairseq before bias correction. The difference affects only
    the first updates, and only if gradients are as small as epsilon.
    """

    build: Any = FactorAdamW  # function that builds the torch optimizer

    def __init__(self, cfg: Any, params: Iterable[Tensor]) -> None:
        super().__init__(cfg)
        self._optimizer = self.build(
            params,
            factor=self.factor,
            betas=_read_betas(cfg.adam_betas),
            eps=cfg.adam_eps,
            weight_decay=cfg.weight_decay,
            **self.optimizer_config,
        )

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        super().add_args(parser)
        bound_options(parser)

    def factor(self, parameter: Tensor) -> Optional[float]:
        """Return the learning rate of a parameter as a multiple of ``--lr``; None excludes the parameter from Adam."""
        return self.cfg.embedding_lr_factor if getattr(parameter, "param_group", "") == "embedding" else 1.0

    @property
    def optimizer_config(self) -> dict[str, Any]:
        return {"lr": self.cfg.lr[0] if isinstance(self.cfg.lr, Sequence) else self.cfg.lr}

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable[..., Tensor]] = None) -> Tensor:
        # On the device of the gradients; the norm is that before clipping.
        parameters = [parameter for parameter in self.params if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T for each matrix U S V^T (SVD), approximated by Newton-Schulz iterations.

    Args:
        matrices: (N, O, I); the dtype sets the precision of the computation.

    Returns:
        Matrices (N, O, I). Singular values are about 0.7 to 1.2, except for near-zero singular values of the input.
    """
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x


class Muon(FactorAdamW):
    """Optimizer with Muon for parameters whose ``factor`` is None, and AdamW for all other parameters.

    Args:
        params: parameters in the order of the model.
        momentum: decay of the Nesterov momentum.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        adam: further arguments of `FactorAdamW`, including ``factor``.
    """

    def __init__(self, params: Iterable[Tensor], momentum: float, weight_decay: float, **adam: Any) -> None:
        super().__init__(params, weight_decay=weight_decay, **adam)
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        lr = self.param_groups[0]["lr"]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in self.excluded:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for shape, matrices in by_shape.items():
            outputs, inputs = shape[-2:]
            size = max(1, MAX_BATCH_SIZE // shape.numel())
            for start in range(0, len(matrices), size):
                batch = matrices[start : start + size]
                updates = torch.stack([self._momentum(each, each.grad) for each in batch])
                # bf16 is precise enough, as in torch.optim.Muon, and several times faster on a GPU.
                stacked = updates.view(-1, outputs, inputs).to(torch.bfloat16 if updates.is_cuda else updates.dtype)
                updates = orthogonalize(stacked).reshape(len(batch), *shape).to(updates.dtype)
                torch._foreach_mul_(batch, 1 - lr * self.weight_decay)
                torch._foreach_add_(batch, [*updates], alpha=-lr * max(1.0, outputs / inputs) ** 0.5)

    def _momentum(self, matrix: Tensor, grad: Any) -> Tensor:
        """Update the momentum of a matrix with ``grad``; return the Nesterov momentum."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(grad, 1 - self.momentum)
        return grad.lerp(state["momentum"], self.momentum)


@declared
@dataclass
class MuonConfig(FusedAdamConfig):
    """Options of ``muon``; ``--lr`` is the learning rate of weight matrices."""

    adam_betas: Any = field(default=(0.9, 0.99), metadata={"help": "betas of Adam"})
    adam_eps: float = opt(1e-10, "epsilon of Adam", range=real())
    muon_momentum: float = opt(0.95, "decay of Muon's momentum", range=real(0, 1, below=True))
    adam_lr_factor: float = opt(
        0.15, "learning rate of Adam (for parameters other than weight matrices), as a multiple of --lr", range=FACTOR
    )
    embedding_lr_factor: float = opt(
        10.0, "learning rate of untied input embeddings, as a multiple of Adam's learning rate", range=FACTOR
    )


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FusedAdam):
    """Fairseq optimizer ``muon``, a wrapper of `Muon`."""

    def build(self, params: Iterable[Tensor], **options: Any) -> FactorAdamW:
        optimizer = Muon(params, self.cfg.muon_momentum, **options)
        logging.getLogger(__name__).info(
            "muon: orthogonalized momentum for %d of %d parameter tensors; Adam for all other tensors",
            len(optimizer.excluded),
            len(optimizer.param_groups[0]["params"]),
        )
        return optimizer

    def factor(self, parameter: Tensor) -> Optional[float]:
        if parameter.dim() in (2, 3) and not hasattr(parameter, "param_group"):
            return None
        return self.cfg.adam_lr_factor * (super().factor(parameter) or 1.0)
