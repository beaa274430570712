"""Anytime training on images: what predicts after a stage, and what the next one begins with.

Without these options the weights at the end of a stage do both, as in the paper.
"""

import argparse
from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.options import Range, real
from fairseq_alma.training.anytime_options import HALF_LIVES

MEAN = "mean"
STAGE_AVERAGES = (MEAN, *HALF_LIVES)
RANGES: Mapping[str, Range] = {"shrink_perturb": real(0, 1, above=True, below=True)}


@dataclass(frozen=True)
class StageEndOptions:
    """Options of alma-stream on images; a field that is None was not given.

    Attributes:
        stage_average: test an average of the weights at the ends of all stages so far: their ``mean``, or one with a
            half-life of this share of the stages so far; training goes on from the weights themselves.
        shrink_perturb: begin a stage with this share of the weights before, the rest newly drawn initial weights
            (after Ash & Adams 2020, On Warm-Starting Neural Network Training).
    """

    stage_average: Optional[str] = None
    shrink_perturb: Optional[float] = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "StageEndOptions":
        """Take the arguments of the same names."""
        return cls(**{field.name: vars(arguments)[field.name] for field in fields(cls)})

    def as_record(self) -> dict[str, Any]:
        """Return what run.json says: what was given."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def check_plans(self, plans: Sequence[StagePlan]) -> None:
        """Raise ValueError if no stage starts from the one before, or in another shape."""
        for name, value in self.as_record().items():
            flag = f"--{name.replace('_', '-')} {value}"
            later = [training for plan in plans[1:] for training in plan.trainings]
            if any(training.growth is not None for training in later):
                raise ValueError(f"{flag}: the weights before growth have another shape than those after; leave it out")
            if not later or any(training.start is None for training in later):
                what = "each stage begins with new weights" if later else "there is one stage"
                raise ValueError(f"{flag}: {what}, so no stage starts from the one before; leave it out")


NO_STAGE_ENDS = StageEndOptions()
