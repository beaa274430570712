"""``--ema-half-life``: a moving average of the weights whose half-life is relative to the training length.

The decay factor at update t is 2^(-1 / (f t)): the half-life is f times the number of updates so far. The average is
therefore useful at every arrival while the learning rate is constant. The weight of an update is a power of its number,
as in Karras et al. 2024 ("Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1). fairseq's
``--store-ema`` has a constant decay factor.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Optional

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, TRAINING, opt
from fairseq_alma.training.feature import Feature

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairseq_alma.checkpoints.checkpoint_file import Checkpoint


def average_decay(update: int, half_life: Fraction) -> float:
    """Return the decay factor of the average at an update, counted from 1."""
    return 2.0 ** float(-1 / (half_life * update))


@dataclass
class WeightAverage(Feature):
    """Update the average of the weights after each update.

    Attributes:
        average: averaged parameters by name, fp32; None before the first update.
    """

    predicts_with: ClassVar[Optional[str]] = "average"

    ema_half_life: Optional[str] = opt(
        None,
        "evaluate averaged weights; half-life as a fraction of the updates so far",
        choices=("1/32", "1/16", "1/8"),
        defaults={TRAINING: NONE},
    )

    def __post_init__(self) -> None:
        self.average: Optional[dict[str, Tensor]] = None

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
            for name, tensor in parameters.items():  # a checkpoint is loaded on the CPU
                self.average[name] = self.average[name].to(tensor.device)
            averages = [self.average[name] for name in parameters]
            weights = [tensor.float() for tensor in parameters.values()]
            torch._foreach_lerp_(averages, weights, 1.0 - average_decay(update + 1, Fraction(self.ema_half_life)))

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {AVERAGE: {name: tensor.cpu() for name, tensor in self.average.items()}} if self.average else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state.get(AVERAGE)


def write_average(path: Path, out: Path) -> None:
    """Write the averaged weights of a checkpoint to a new checkpoint; raises the errors of `averaged_model`."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint

    write_checkpoint(averaged_model(read_checkpoint(path), path), out)


def averaged_model(checkpoint: "Checkpoint", path: Path) -> "Checkpoint":
    """Return the checkpoint loaded from ``path`` with its averaged weights and without optimizer state.

    Raises:
        AlmaError: the checkpoint has no averaged weights, or their shapes differ from the shapes of the model.
    """
    from fairseq_alma.checkpoints.checkpoint_file import find_average, with_shared_names

    if (entry := find_average(checkpoint)) is None:
        raise AlmaError(f"{path}: has no averaged weights; train with --ema-half-life")
    weights = with_shared_names(checkpoint["model"], entry[AVERAGE])
    wrong = [name for name, tensor in checkpoint["model"].items() if weights[name].shape != tensor.shape]
    if wrong or entry[AVERAGE].keys() - weights.keys():
        raise AlmaError(f"{path}: the averaged weights have other shapes than the model; remove it to train again")
    states = {name: each for name, each in checkpoint["extra_state"].items() if each is not entry}
    kept = {name: entry for name, entry in checkpoint.items() if name != "last_optimizer_state"}
    return {**kept, "model": weights, "extra_state": states}
