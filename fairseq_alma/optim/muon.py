"""Muon: the momentum of each weight matrix, made orthogonal by Newton-Schulz iterations; Adam for all other parameters.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". A matrix is a parameter with two axes, or
one of a stack with three (experts), unless its model marks it otherwise in ``param_group``: ``embedding`` (input
embeddings) and ``adam`` (output projection, gates). Matrices of one shape are orthogonalized in one batched product.

Letters: N matrices, O outputs, I inputs.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch
from fairseq.optim import register_optimizer
from torch import Tensor

from fairseq_alma.optim.fused_adam import FACTOR, FactorAdamW, FusedAdam, FusedAdamConfig
from fairseq_alma.options import opt, real
from fairseq_alma.training.fairseq_options import declared

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOST_AT_ONCE = 2**24
"""Numbers in a batch of matrices, so that temporary copies stay small beside a large model."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U S' V^T for matrices (N, O, I) = U S V^T, with S' between 0.7 and 1.2: a Newton-Schulz iteration.

    Args:
        matrices: in the precision of the computation.
    """
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x


class Muon(FactorAdamW):
    """Muon for matrices at the group's rate, AdamW for other parameters at a multiple of it.

    Args:
        params: in the order of the model.
        is_matrix: returns whether Muon takes a parameter.
        momentum: decay of the momentum (Nesterov's).
        weight_decay: share of a weight that is taken off, times its rate.
        adam: further arguments of `FactorAdamW`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        is_matrix: Callable[[Tensor], bool],
        momentum: float,
        weight_decay: float,
        **adam: Any,
    ) -> None:
        super().__init__(params, weight_decay=weight_decay, **adam)
        self.momentum = momentum
        self.matrices = [each for each in self.param_groups[0]["params"] if is_matrix(each)]
        matrices = {*self.matrices}
        self.by_factor = {
            factor: [each for each in parameters if each not in matrices]
            for factor, parameters in self.by_factor.items()
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make an update; parameters without a gradient stay."""
        super().step()
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for matrix in self.matrices:
            if matrix.grad is not None:
                by_shape.setdefault((matrix.size(-2), matrix.size(-1)), []).append(matrix)
        for (outputs, inputs), matrices in by_shape.items():
            rate = self.param_groups[0]["lr"] * max(1.0, outputs / inputs) ** 0.5
            for some in _in_batches(matrices):
                updates = orthogonalize(torch.cat([self._momentum(each).view(-1, outputs, inputs) for each in some]))
                parts = updates.split([each.numel() // (outputs * inputs) for each in some])
                parts = [part.view_as(each) for part, each in zip(parts, some, strict=True)]
                torch._foreach_mul_(some, 1 - self.param_groups[0]["lr"] * self.weight_decay)
                torch._foreach_add_(some, parts, alpha=-rate)

    def _momentum(self, matrix: Tensor) -> Tensor:
        """Return Nesterov's momentum with this update's gradient."""
        state, grad = self.state[matrix], matrix.grad
        assert grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(grad, 1 - self.momentum)
        return grad.lerp(state["momentum"], self.momentum)


def _in_batches(matrices: list[Tensor]) -> Iterable[list[Tensor]]:
    """Yield parameters of one matrix shape together, as many as `MOST_AT_ONCE` allows."""
    batch: list[Tensor] = []
    for matrix in matrices:
        if batch and sum(each.numel() for each in batch) + matrix.numel() > MOST_AT_ONCE:
            yield batch
            batch = []
        batch.append(matrix)
    yield batch


@declared
@dataclass
class MuonConfig(FusedAdamConfig):
    """Options of ``muon``; ``--lr`` is the rate of the matrices."""

    adam_betas: Any = field(default=(0.9, 0.99), metadata={"help": "betas of Adam"})
    adam_eps: float = field(default=1e-10, metadata={"help": "epsilon of Adam"})
    muon_momentum: float = opt(0.95, "decay of Muon's momentum", range=real(0, 1, below=True))
    adam_lr_factor: float = opt(
        0.15, "learning rate of Adam, for parameters that are no matrices, as a multiple of --lr", range=FACTOR
    )
    embedding_lr_factor: float = opt(
        10.0, "learning rate of untied input embeddings, as a multiple of Adam's", range=FACTOR
    )


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FusedAdam):
    """``--optimizer muon``; see above."""

    def _build(self, params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        optimizer = Muon(params, is_matrix, self.cfg.muon_momentum, **options)
        logging.getLogger(__name__).info(
            "muon: orthogonal momentum for %d of %d parameters; Adam for the others (embeddings, output projection, "
            "gates, and those that are no matrices)",
            len(optimizer.matrices),
            len(optimizer.param_groups[0]["params"]),
        )
        return optimizer

    def _factor(self, parameter: Tensor) -> float:
        return self.cfg.adam_lr_factor * super()._factor(parameter)


def is_matrix(parameter: Tensor) -> bool:
    """Return whether Muon takes a parameter: a weight matrix or a stack of them, and not marked otherwise."""
    return parameter.dim() in (2, 3) and not hasattr(parameter, "param_group")
