"""What predicts after a stage, and what the next one begins with: of text the best checkpoint, of images a mean.

Without these options the weights at the end of a stage do both, as in the paper. Source of the average: Izmailov et al.
2018, Averaging Weights Leads to Wider Optima; here over stages rather than epochs.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Mapping, Optional

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.options import PLAN, opt, real
from fairseq_alma.training.average import HALF_LIVES
from fairseq_alma.training.feature import Feature, Part, PlannedRun, Setting

if TYPE_CHECKING:
    from torch import Tensor, nn

MEAN = "mean"


def share_of_new(stage: int, how: str) -> float:
    """Return the share that the weights at the end of a stage have in the average: 1 after the first one.

    Args:
        stage: from 0.
        how: ``mean``, or the half-life as a share of the stages so far.
    """
    if stage == 0:
        return 1.0
    return 1 / (stage + 1) if how == MEAN else 1 - 2.0 ** float(-1 / (Fraction(how) * (stage + 1)))


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

    def __post_init__(self) -> None:
        self._stage = 0
        self._before: Mapping[str, Tensor] = {}

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

    def for_part(self, part: Part) -> "StageEnds":
        """Return it for one stage."""
        own = super().for_part(part)
        own._stage = part.stage
        return own

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the shares of the stage's weights and of those that it began with."""
        average, kept = self.stage_average, self.shrink_perturb
        described = {} if average is None else {"newest_share": share_of_new(part.stage, average)}
        return described | ({"kept_share": kept} if part.stage and kept is not None else {})

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Keep a share of each weight, and all of the average so far."""
        self._before = checkpoint.get(AVERAGE, {})
        if self.shrink_perturb is None:
            return
        assert setting.draw_weights is not None  # of a stage that starts from another
        for name, drawn in setting.draw_weights().items():
            weight = checkpoint["model"][name]
            weight.mul_(self.shrink_perturb).add_(drawn.to(weight.device), alpha=1 - self.shrink_perturb)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return the average with the weights as they are now in it, in fp32."""
        if self.stage_average is None:
            return None
        share, now = share_of_new(self._stage, self.stage_average), model.state_dict()
        return {name: before.to(now[name].device).lerp(now[name], share) for name, before in self._before.items()}


@dataclass
class BestCheckpoint(Feature):
    """Lets fairseq-train keep the checkpoint with the lowest loss on ``valid``."""

    best_checkpoint: Optional[bool] = opt(
        None,
        "test the checkpoint of a stage with the lowest loss on valid, of those that --save-every makes and the last; "
        "the next stage begins with it, unless the optimizer is carried on",
        kinds=("text",),
        side=PLAN,
    )

    @property
    def predicts_with(self) -> Optional[str]:
        """The best."""
        return "best" if self.best_checkpoint else None

    @property
    def way(self) -> Optional[str]:
        """The option."""
        return "--best-checkpoint" if self.best_checkpoint else None

    def words(self) -> list[str]:
        """Return fairseq's option."""
        return ["--best-checkpoint-metric", "nll_loss"]
