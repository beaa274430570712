"""``fused_adam``: Adam with the fused kernel of torch, and a separate learning rate for input embeddings.

Without apex, fairseq's Adam reads all weights eleven times per update. In a mixture of experts, these reads take a
tenth of the time of an update.

fairseq sets one learning rate for all parameter groups and numbers the optimizer state by group. Therefore this
optimizer has a single group with all parameters in the order of the model, and a learning rate factor for each
parameter. Models set the attribute ``param_group`` of input embeddings to ``embedding``; the fp16 optimizer of fairseq
copies this attribute.
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

from fairseq_alma.options import opt, real
from fairseq_alma.training.fairseq_options import bound_options, declared

FACTOR = real(0, 1e6, above=True)


class FactorAdamW(torch.optim.Optimizer):
    """AdamW with a learning rate factor for each parameter.

    Args:
        params: parameters in the order of the model.
        lr: learning rate of the group.
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


@declared
@dataclass
class FusedAdamConfig(FairseqDataclass):
    """Options of ``fused_adam``. Options with the same name as in fairseq's ``adam`` have the same meaning."""

    adam_betas: Any = field(default=(0.9, 0.999), metadata={"help": "betas of Adam"})
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon of Adam"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay"})
    lr: Any = field(default=II("optimization.lr"))
    embedding_lr_factor: float = opt(
        10.0, "learning rate of untied input embeddings of alma_transformer_lm, as a multiple of --lr", range=FACTOR
    )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):
    """Fused AdamW for fairseq, on CPU or GPU.

    Updates differ from updates of fairseq's Adam only in the use of epsilon: torch adds epsilon to the bias-corrected
    root of the second moment, but fairseq adds epsilon to the uncorrected root. The difference affects the first
    updates if gradients are as small as epsilon.
    """

    build: Any = FactorAdamW  # function that builds the torch optimizer

    def __init__(self, cfg: Any, params: Iterable[Tensor]) -> None:
        super().__init__(cfg)
        betas = tuple(ast.literal_eval(cfg.adam_betas) if isinstance(cfg.adam_betas, str) else cfg.adam_betas)
        adam = {"betas": betas, "eps": cfg.adam_eps, "weight_decay": cfg.weight_decay, **self.optimizer_config}
        self._optimizer = self.build(params, factor=self.factor, **adam)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        super().add_args(parser)
        bound_options(parser)

    def factor(self, parameter: Tensor) -> Optional[float]:
        """Return the learning rate of a parameter as a multiple of ``--lr``; None excludes the parameter from Adam."""
        return self.cfg.embedding_lr_factor if getattr(parameter, "param_group", "") == "embedding" else 1.0

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the options that take precedence over the options in a checkpoint when training resumes."""
        return {"lr": self.cfg.lr[0] if isinstance(self.cfg.lr, Sequence) else self.cfg.lr}

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable[..., Tensor]] = None) -> Tensor:
        """Clip gradients to a maximum total norm, on the device of the gradients; return the norm before clipping."""
        parameters = [parameter for parameter in self.params if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
