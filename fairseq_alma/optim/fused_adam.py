"""Adam in one pass over memory, with a learning rate of its own for input embeddings.

fairseq's own Adam goes through all weights eleven times, one parameter after the other, unless apex is installed: a
tenth of an update of a mixture, most of whose weights have few tokens to compute on.

fairseq sets one learning rate for all parameter groups, and numbers an optimizer's state by them. So there is one group
here, in the model's order, and each parameter's rate is a multiple of it. What kind a parameter is, its model says in
the attribute ``param_group``, which fairseq's fp16 optimizer copies: ``embedding`` for input embeddings.
"""

import ast
from argparse import ArgumentParser
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Optional, Sequence

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor
from torch.optim.adamw import adamw

from fairseq_alma.options import opt, real
from fairseq_alma.training.fairseq_options import bound_options, declared

FACTOR = real(0, 1e6, above=True)


class FactorAdamW(torch.optim.Optimizer):
    """AdamW, fused, whose rate is for each parameter a multiple of the group's.

    Args:
        params: in the order of the model.
        lr: the group's learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of a weight that is taken off, times the rate.
        factor: returns the multiple for a parameter.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        factor: Callable[[Tensor], float],
    ) -> None:
        super().__init__(params, {"lr": lr, "fused": True})  # fused: torch keeps the steps where the parameters are
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.by_factor: dict[float, list[Tensor]] = {}
        for parameter in self.param_groups[0]["params"]:
            self.by_factor.setdefault(factor(parameter), []).append(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make an update; parameters without a gradient stay."""
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.betas
        for factor, parameters in self.by_factor.items():
            found = [each for each in parameters if each.grad is not None]
            for each in found:
                if not self.state[each]:
                    self.state[each]["step"] = torch.zeros((), dtype=torch.float32, device=each.device)
                    self.state[each]["exp_avg"] = torch.zeros_like(each)
                    self.state[each]["exp_avg_sq"] = torch.zeros_like(each)
            first, second, steps = (
                [self.state[each][name] for each in found] for name in ("exp_avg", "exp_avg_sq", "step")
            )
            adamw(
                found,
                [each.grad for each in found if each.grad is not None],
                first,
                second,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr * factor,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )


@declared
@dataclass
class FusedAdamConfig(FairseqDataclass):
    """Options of ``fused_adam``; those that it shares with fairseq's ``adam`` mean the same."""

    adam_betas: Any = field(default=(0.9, 0.999), metadata={"help": "betas of Adam"})
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon of Adam"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay"})
    lr: Any = field(default=II("optimization.lr"))
    embedding_lr_factor: float = opt(
        10.0, "learning rate of untied input embeddings of alma_transformer_lm, as a multiple of --lr", range=FACTOR
    )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):
    """torch's fused AdamW under the options of ``--optimizer adam``, on a CPU or a GPU.

    The same update but for ``--adam-eps``, which torch adds to the corrected root of the second moment and fairseq to
    the uncorrected one: from zero moments on, the first updates differ where gradients are that small.
    """

    def __init__(self, cfg: Any, params: Iterable[Tensor]) -> None:
        super().__init__(cfg)
        betas = ast.literal_eval(cfg.adam_betas) if isinstance(cfg.adam_betas, str) else cfg.adam_betas
        adam = {"betas": tuple(betas), "eps": cfg.adam_eps, "weight_decay": cfg.weight_decay, "factor": self._factor}
        self._optimizer = self._build(params, **self.optimizer_config, **adam)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        super().add_args(parser)
        bound_options(parser)

    def _build(self, params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        return FactorAdamW(params, **options)

    def _factor(self, parameter: Tensor) -> float:
        return self.cfg.embedding_lr_factor if getattr(parameter, "param_group", "") == "embedding" else 1.0

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Options of the command that replace a checkpoint's when training resumes."""
        return {"lr": self.cfg.lr[0] if isinstance(self.cfg.lr, Sequence) else self.cfg.lr}

    @property
    def supports_flat_params(self) -> bool:
        """Return False: one flat vector has one learning rate."""
        return False

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable[..., Tensor]] = None) -> Tensor:
        """Clip by the norm over all parameters, where they are, and return it."""
        parameters = [parameter for parameter in self.params if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
