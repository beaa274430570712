"""Which weights stay on disk after a stage: those that predict, and those that a later stage needs."""

from typing import Iterable

from fairseq_alma.learners.plan import ModelId, StagePlan


class NeededModels:
    """Which models' weights must stay on disk after a stage.

    Args:
        plans: all plans of the run.
    """

    def __init__(self, plans: Iterable[StagePlan]) -> None:
        self.last_use: dict[ModelId, int] = {}
        for plan in plans:  # in order, so that later uses replace earlier ones
            index = plan.stage.index
            starts = [training.start for training in plan.trainings if training.start is not None]
            # What a stage starts from must be there when the stage before is complete: a use one stage earlier.
            self.last_use.update({start: max(self.last_use.get(start, 0), index - 1) for start in starts})
            self.last_use.update(dict.fromkeys(plan.predictors, index))

    def after(self, done: int) -> list[ModelId]:
        """Return what predicts after stage ``done``, and what later stages start from or predict with, in order."""
        return sorted(model for model, last in self.last_use.items() if model.stage <= done <= last)
