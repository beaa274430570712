"""Anytime training on images: what predicts after a stage, and what the next one begins with.

Without these options the weights at the end of a stage do both, as in the paper.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.options import Options, opt
from fairseq_alma.training.anytime_options import HALF_LIVES, SHARE

MEAN = "mean"
IMAGES = ("images",)


@dataclass(frozen=True)
class StageEndOptions(Options):
    """Options of alma-stream on images; a field that is None was not given."""

    stage_average: Optional[str] = opt(
        None,
        "test the mean of the weights at the ends of all stages so far, or an average with a half-life of this share "
        "of the stages so far; training goes on from the weights themselves (default: test these)",
        choices=(MEAN, *HALF_LIVES),
        kinds=IMAGES,
    )
    shrink_perturb: Optional[float] = opt(  # after Ash & Adams 2020, On Warm-Starting Neural Network Training
        None,
        "begin each stage with this share of the weights before, the rest newly drawn initial weights (default: all of "
        "them)",
        range=SHARE,
        kinds=IMAGES,
        metavar="S",
    )

    def check_plans(self, plans: Sequence[StagePlan]) -> None:
        """Raise ValueError if no stage starts from the one before, or in another shape."""
        for name, value in self.record().items():
            flag = f"--{name.replace('_', '-')} {value}"
            later = [training for plan in plans[1:] for training in plan.trainings]
            if any(training.growth is not None for training in later):
                raise ValueError(f"{flag}: the weights before growth have another shape than those after; leave it out")
            if not later or any(training.start is None for training in later):
                what = "each stage begins with new weights" if later else "there is one stage"
                raise ValueError(f"{flag}: {what}, so no stage starts from the one before; leave it out")


NO_STAGE_ENDS = StageEndOptions()
