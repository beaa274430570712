"""Matrix products in bf16 with fp32 weights (torch's autocast) on any device; fairseq's half precisions are refused.

fairseq's fp16 and bf16 optimizers keep their fp32 weights out of the checkpoint and its ``--amp`` the loss scale, so a
resumed training differs. Its parser also turns ``--bf16`` into ``--tpu``.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ContextManager, Optional

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
        reason = "does not use a GPU" if option_string in FOR_TPUS else "does not resume exactly"
        raise AlmaError(f"{option_string}: fairseq's own {reason}; give --autocast bf16, or nothing for fp32")


def refuse_inexact_precision(parser: argparse.ArgumentParser, evaluates: bool) -> None:
    """Make the parser of a stock command refuse fairseq's half precisions; a test may halve weights by ``--fp16``."""
    group = parser.add_argument_group("refused", conflict_handler="resolve")  # takes options from whoever has them
    for option in FOR_TPUS if evaluates else (*FOR_TPUS, *INEXACT):
        group.add_argument(option, action=RefusedPrecision, nargs=0, default=False, help="see --autocast")


@dataclass
class Autocast(Feature):
    """Makes all forward passes under autocast to bf16."""

    autocast: Optional[str] = opt(
        None,
        "matrix products in bf16; weights in model, optimizer and checkpoint stay fp32",
        choices=("bf16",),
        side=TRAINING,
        defaults={TRAINING: NONE},
    )

    def prepare(self, setting: Setting) -> None:
        import torch

        on_cpu = setting.device == "cpu"
        check = torch.ops.mkldnn._is_mkldnn_bf16_supported if on_cpu else torch.cuda.is_bf16_supported
        if not (check() if on_cpu else check(including_emulation=False)):
            device = "processor" if on_cpu else "GPU"
            raise AlmaError(f"--autocast bf16: this {device} has no bf16 arithmetic; train without the option")

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        import torch

        return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)
