"""A branch: the learning rate of the last updates goes down to zero, whatever schedule it follows before.

Source: warmup-stable-decay (Hu et al. 2024, MiniCPM); the shape 1 - sqrt is that of Hägele et al. 2024.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from fairseq_alma.options import TRAINING, opt
from fairseq_alma.training.feature import Feature, register_feature

if TYPE_CHECKING:
    from torch import nn

SHAPES = ("sqrt", "linear")


def branch_factor(update: int, first: int, end: int, shape: str) -> float:
    """Return what the learning rate of an update is multiplied by.

    Args:
        update: its number, from 0.
        first: the first update of the branch; it and those before have the factor 1.
        end: the update at which the learning rate would be 0; the one before is the last.
        shape: ``sqrt`` or ``linear``.
    """
    progress = min(1.0, max(0.0, (update - first) / (end - first)))
    return 1.0 - (progress**0.5 if shape == "sqrt" else progress)


@register_feature
@dataclass
class LRBranch(Feature):
    """Multiplies the learning rate of each update by `branch_factor`, for that update alone."""

    branch_shape: Optional[str] = opt(
        None,
        f"of that decay: 1 - sqrt, or linear (default: {SHAPES[0]})",
        choices=SHAPES,
        kinds=("text",),
        defaults={TRAINING: SHAPES[0]},
    )
    branch_from: Optional[int] = opt(
        None, "decay the learning rate from this update on, whatever the schedule says", side=TRAINING
    )
    branch_until: Optional[int] = opt(None, "to zero at this update", side=TRAINING)

    def __post_init__(self) -> None:
        self._rates: list[float] = []

    @property
    def is_on(self) -> bool:
        """Whether the training at hand decays."""
        return self.branch_from is not None and self.branch_until is not None

    @property
    def shape(self) -> str:
        """Shape of the decay."""
        return self.branch_shape or SHAPES[0]

    def before_step(self, optimizer: Any, update: int) -> None:
        """Lower the learning rate."""
        assert self.branch_from is not None and self.branch_until is not None
        factor = branch_factor(update, self.branch_from, self.branch_until, self.shape)
        self._groups = optimizer.param_groups
        self._rates = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Set the learning rate back: a loop without a schedule does not set it anew for each update."""
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
