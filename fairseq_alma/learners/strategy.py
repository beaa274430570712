"""The learners. Each one turns a stage into a plan; a new learner is a class here and one line of `LEARNERS`.

Source: sections 4.1 and 4.2 of the paper.
"""

from dataclasses import dataclass
from typing import Optional, Protocol, Sequence

from fairseq_alma.learners.plan import Model, StagePlan, Training, member_seed
from fairseq_alma.learners.schedule import Stage


@dataclass(frozen=True)
class LearnerOptions:
    """What every learner is told.

    Attributes:
        seed: of the run.
        from_previous: start each stage from the weights of the one before, rather than from scratch.
    """

    seed: int
    from_previous: bool = True


class Learner(Protocol):
    """Decides what a stage trains and what predicts after it."""

    def __init__(self, options: LearnerOptions) -> None: ...

    def plan(self, stage: Stage) -> StagePlan:
        """Plan one stage, from its data and the options alone."""


class SingleModel:
    """SM (FT in the paper's first version): one model, fine-tuned stage after stage."""

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Train the one model of the stage before, or a new one."""
        model = Model(stage.index, 0)
        start: Optional[Model] = None
        if self.options.from_previous and stage.index > 0:
            start = Model(stage.index - 1, 0)
        training = Training(model, member_seed(self.options.seed, 0), start)
        return StagePlan(stage, trainings=(training,), predictors=(model,))


LEARNERS: dict[str, type[Learner]] = {"sm": SingleModel}


def plan_stages(learner: str, options: LearnerOptions, stages: Sequence[Stage]) -> list[StagePlan]:
    """Plan a whole stream for the learner of that name in `LEARNERS`."""
    strategy = LEARNERS[learner](options)
    return [strategy.plan(stage) for stage in stages]
