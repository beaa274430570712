"""Matrix products in bf16, weights in fp32 (torch's autocast), on any device; fairseq's own half precisions refused.

fairseq's fp16 and bf16 optimizers keep their fp32 weights out of the checkpoint and its ``--amp`` the loss scale, so a
training that resumes differs from one that ran through. Its parser also turns ``--bf16`` into ``--tpu``.
"""

import argparse
from typing import Any, Callable

import torch
from torch import Tensor, nn

from fairseq_alma.errors import AlmaError

FOR_TPUS = ("--bf16", "--memory-efficient-bf16", "--tpu")
INEXACT = ("--fp16", "--memory-efficient-fp16", "--amp")

Criterion = Callable[..., tuple[Tensor, int, dict[str, Any]]]


class RefusedPrecision(argparse.Action):
    """An option of fairseq's that ends the command with one line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Raise AlmaError."""
        reason = "does not use a GPU" if option_string in FOR_TPUS else "does not resume exactly"
        raise AlmaError(f"{option_string}: fairseq's own {reason}; give --autocast bf16, or nothing for fp32")


def refuse_inexact_precision(parser: argparse.ArgumentParser, evaluates: bool) -> None:
    """Make an option parser refuse fairseq's half precisions.

    Args:
        parser: of a stock command.
        evaluates: the command does not train; then ``--fp16`` halves the weights, as ever.
    """
    group = parser.add_argument_group("refused", conflict_handler="resolve")  # takes options from whoever has them
    for option in FOR_TPUS if evaluates else (*FOR_TPUS, *INEXACT):
        group.add_argument(option, action=RefusedPrecision, nargs=0, default=False, help="see --autocast")


def require_bf16(option: str, on_cpu: bool) -> None:
    """Raise AlmaError if the device that a command uses computes nothing in bf16."""
    if on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise AlmaError(f"{option}: this processor has no bf16 arithmetic; train without the option")
    if not on_cpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise AlmaError(f"{option}: this GPU has no bf16 arithmetic; train without the option")


class AutocastSteps:
    """Mixed into a task, in front of fairseq's class: forward passes under autocast where its options say so."""

    args: Any

    def train_step(self, sample: Any, model: nn.Module, criterion: Criterion, *args: Any, **kwargs: Any) -> Any:
        """Compute loss and gradients of one batch; fairseq calls this."""
        enabled = self.args.autocast == "bf16" or self.args.cpu_bf16
        criterion = _autocast(criterion, model) if enabled else criterion
        return super().train_step(sample, model, criterion, *args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: nn.Module, criterion: Criterion, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one held-out batch; fairseq calls this."""
        criterion = _autocast(criterion, model) if self.args.autocast == "bf16" else criterion
        return super().valid_step(sample, model, criterion, *args, **kwargs)  # type: ignore[misc]

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model; fairseq-eval-lm calls one from a checkpoint itself, without a step of the task."""
        model = super().build_model(cfg, from_checkpoint)  # type: ignore[misc]
        if from_checkpoint and self.args.autocast == "bf16":
            model.forward = _autocast(model.forward, model)
        return model


def _autocast(function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Return a function that runs under autocast to bf16, on the model's device when it is called.

    Around the criterion alone, because fairseq's ``train_step`` switches autocast off for what it calls, and because
    gradients take the precision of their forward pass by themselves: those of the gate stay in fp32.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            return function(*args, **kwargs)

    return call
