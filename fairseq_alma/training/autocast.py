"""``--autocast``: compute matrix products in bf16 with fp32 weights, and reject fairseq's half precision.

fairseq's fp16 and bf16 optimizers do not save their fp32 weights, and ``--amp`` does not save the loss scale. A resumed
training would therefore differ from an uninterrupted training. With ``--bf16``, fairseq's parser also sets ``--tpu``.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ContextManager, Optional

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, TRAINING, opt
from fairseq_alma.training.feature import Feature, Setting

if TYPE_CHECKING:
    from torch import nn

_FOR_TPUS = ("--bf16", "--memory-efficient-bf16", "--tpu")
_INEXACT = ("--fp16", "--memory-efficient-fp16", "--amp")


class _RejectedPrecision(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        reason = "would not use the GPU" if option_string in _FOR_TPUS else "does not allow an exact resume"
        raise AlmaError(f"{option_string}: fairseq's half precision {reason}; give --autocast bf16, or use fp32")


def refuse_inexact_precision(parser: argparse.ArgumentParser, evaluates: bool) -> None:
    """Make the parser of a fairseq command reject bf16 and ``--tpu`` and, for training, also fp16 and ``--amp``."""
    group = parser.add_argument_group("rejected options", conflict_handler="resolve")  # replaces fairseq's options
    for option in _FOR_TPUS if evaluates else (*_FOR_TPUS, *_INEXACT):
        group.add_argument(option, action=_RejectedPrecision, nargs=0, default=False, help="see --autocast")


@dataclass
class Autocast(Feature):
    """Feature that runs forward passes under ``torch.autocast`` in bf16."""

    autocast: Optional[str] = opt(
        None,
        "data type of matrix products; model weights, optimizer state and checkpoints are fp32",
        choices=("bf16",),
        side=TRAINING,
        defaults={TRAINING: NONE},
    )

    def prepare(self, setting: Setting) -> None:
        import torch

        if setting.device == "cpu":
            device, is_supported = "processor", torch.ops.mkldnn._is_mkldnn_bf16_supported()
        else:
            device, is_supported = "GPU", torch.cuda.is_bf16_supported(including_emulation=False)
        if not is_supported:
            raise AlmaError(f"--autocast bf16: this {device} does not support bf16; omit --autocast")

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        import torch

        return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)
