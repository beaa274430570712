"""Matrix products in bf16, weights in fp32 (torch's autocast), on any device; fairseq's own half precisions refused.

fairseq's fp16 and bf16 optimizers keep their fp32 weights out of the checkpoint and its ``--amp`` the loss scale, so a
training that resumes differs from one that ran through. Its parser also turns ``--bf16`` into ``--tpu``.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, ContextManager, Optional

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, TRAINING, opt
from fairseq_alma.training.feature import Feature, Setting

if TYPE_CHECKING:
    from torch import nn

FOR_TPUS = ("--bf16", "--memory-efficient-bf16", "--tpu")
INEXACT = ("--fp16", "--memory-efficient-fp16", "--amp")


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


@dataclass
class Autocast(Feature):
    """Makes all forward passes under autocast to bf16."""

    computes_in: ClassVar[Optional[str]] = "bfloat16"

    autocast: Optional[str] = opt(
        None,
        "bf16: matrix products in bf16, weights in model, optimizer and checkpoint in fp32; for a GPU, or with --cpu a "
        "processor, that has bf16. fairseq's own --bf16, --fp16 and --amp do not resume exactly",
        choices=("bf16",),
        side=TRAINING,
        defaults={TRAINING: NONE},
    )

    def prepare(self, setting: Setting) -> None:
        """Refuse a device that computes nothing in bf16."""
        import torch

        if setting.device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise AlmaError("--autocast bf16: this processor has no bf16 arithmetic; train without the option")
        if setting.device != "cpu" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise AlmaError("--autocast bf16: this GPU has no bf16 arithmetic; train without the option")

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        """Return autocast on the model's device."""
        import torch

        return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)
