"""``muon``: orthogonalized momentum for weight matrices, Adam for all other parameters.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Weight matrices are parameters
with two dimensions (three for stacked experts) and without the attribute ``param_group``. Models set ``param_group`` to
``embedding`` for input embeddings, and to ``adam`` for the output projection and gates.

Letters: N matrices, O outputs, I inputs.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional

import torch
from fairseq.optim import register_optimizer
from torch import Tensor

from fairseq_alma.optim.fused_adam import FACTOR, FactorAdamW, FusedAdam, FusedAdamConfig
from fairseq_alma.options import opt, real
from fairseq_alma.training.fairseq_options import declared

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MAX_BATCH_SIZE = 2**24
"""Maximum number of matrix elements per call of `orthogonalize`, to limit temporary memory."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T for each matrix U S V^T (SVD), approximated by Newton-Schulz iterations.

    Args:
        matrices: (N, O, I); the dtype sets the precision of the computation.

    Returns:
        Matrices (N, O, I) with singular values between 0.7 and 1.2.
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
                updates = orthogonalize(updates.view(-1, outputs, inputs)).reshape(len(batch), *shape)
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
    adam_eps: float = field(default=1e-10, metadata={"help": "epsilon of Adam"})
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
