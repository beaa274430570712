"""``--ema-half-life``: a moving average of the weights whose half-life is relative to the training length.

The decay factor at update t (from 1) is 2^(-1 / (f t)): the half-life is f times the number of updates so far. The
average is therefore useful at every arrival, even with a constant learning rate. The contribution of update t is a
power of t, as in Karras et al. 2024 ("Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1).
fairseq's ``--store-ema`` has a constant decay factor.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Optional

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, TRAINING, opt
from fairseq_alma.training.feature import Feature

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class WeightAverage(Feature):
    """Moving average of the weights, updated after each optimizer step.

    Attributes:
        average: averaged parameters by name, fp32; None before the first update.
    """

    predicts_with: ClassVar[Optional[str]] = "average"

    ema_half_life: Optional[str] = opt(
        None,
        "evaluate a moving average of the weights, with this half-life as a fraction of the updates so far",
        choices=("1/32", "1/16", "1/8"),
        defaults={TRAINING: NONE},
    )
    average: Optional[dict[str, Any]] = field(default=None, init=False)

    def after_step(self, model: "nn.Module", update: int) -> None:
        import torch

        assert self.ema_half_life is not None
        while isinstance(wrapped := getattr(model, "module", None), torch.nn.Module):  # data-parallel wrappers
            model = wrapped
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            if self.average is None:
                self.average = {name: tensor.detach().clone().float() for name, tensor in parameters.items()}
                return
            for name, tensor in parameters.items():  # averages from a checkpoint are on the CPU
                self.average[name] = self.average[name].to(tensor.device)
            averages = [self.average[name] for name in parameters]
            weights = [tensor.float() for tensor in parameters.values()]
            decay = 2.0 ** float(-1 / (Fraction(self.ema_half_life) * (update + 1)))
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {AVERAGE: {name: tensor.cpu() for name, tensor in self.average.items()}} if self.average else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state.get(AVERAGE)


def write_average(path: Path, out: Path) -> None:
    """Write a checkpoint ``out`` with the averaged weights of the checkpoint ``path``, without optimizer state.

    Raises:
        AlmaError: the averaged weights are missing, or differ in names or shapes from the weights of the model.
    """
    from fairseq_alma.checkpoints.checkpoint_file import (
        find_average,
        read_checkpoint,
        with_shared_names,
        write_checkpoint,
    )

    checkpoint = read_checkpoint(path)
    if (entry := find_average(checkpoint)) is None:
        raise AlmaError(f"{path}: has no averaged weights; train with --ema-half-life")
    weights = with_shared_names(checkpoint["model"], entry[AVERAGE])
    wrong = [name for name, tensor in checkpoint["model"].items() if weights[name].shape != tensor.shape]
    if wrong or entry[AVERAGE].keys() - weights.keys():
        raise AlmaError(
            f"{path}: names or shapes of the averaged weights do not match the model; remove this file to train again"
        )
    states = {name: each for name, each in checkpoint["extra_state"].items() if each is not entry}
    kept = {name: entry for name, entry in checkpoint.items() if name != "last_optimizer_state"}
    write_checkpoint({**kept, "model": weights, "extra_state": states}, out)
