"""Anytime training on images: what predicts after a stage, and what the next one begins with.

Without these options the weights at the end of a stage do both, as in the paper.
"""

from dataclasses import dataclass
from typing import Optional

from fairseq_alma.options import PLAN, opt, real
from fairseq_alma.training.average import HALF_LIVES
from fairseq_alma.training.feature import Feature
from fairseq_alma.training.planned_run import PlannedRun

MEAN = "mean"


@dataclass
class StageEnds(Feature):
    """What happens between two stages."""

    stage_average: Optional[str] = opt(
        None,
        "test the mean of the weights at the ends of all stages so far, or an average with a half-life of this share "
        "of the stages so far; training goes on from the weights themselves (default: test these)",
        choices=(MEAN, *HALF_LIVES),
        kinds=("images",),
        side=PLAN,
    )
    shrink_perturb: Optional[float] = opt(  # after Ash & Adams 2020, On Warm-Starting Neural Network Training
        None,
        "begin each stage with this share of the weights before, the rest newly drawn initial weights (default: all of "
        "them)",
        range=real(0, 1, above=True, below=True),
        kinds=("images",),
        side=PLAN,
        metavar="S",
    )

    @property
    def predicts_with(self) -> Optional[str]:
        """The average."""
        return None if self.stage_average is None else "average"

    @property
    def way(self) -> Optional[str]:
        """The option."""
        return None if self.stage_average is None else f"--stage-average {self.stage_average}"

    def check(self, run: PlannedRun) -> None:
        """Refuse stages that do not start from the one before, or in another shape."""
        for name, value in self.record().items():
            flag = f"--{name.replace('_', '-')} {value}"
            later = [training for plan in run.plans[1:] for training in plan.trainings]
            if any(training.growth is not None for training in later):
                raise ValueError(f"{flag}: the weights before growth have another shape than those after; leave it out")
            if not later or any(training.start is None for training in later):
                what = "each stage begins with new weights" if later else "there is one stage"
                raise ValueError(f"{flag}: {what}, so no stage starts from the one before; leave it out")
