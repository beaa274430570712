"""Which models' weights a run still needs, and whether they are there."""

import contextlib
from typing import TYPE_CHECKING, Iterable, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from fairseq_alma.runs.loop import Backend


def is_trained(folder: RunFolder, plans: Sequence[StagePlan], model: ModelId, backend: "Backend") -> bool:
    """Return whether a model is trained to its end. Raises AlmaError if a checkpoint is damaged."""
    return all(step.is_done(model) for step in backend.steps(folder, plans[model.stage]) if model in step.trains)


def has_weights(folder: RunFolder, plans: Sequence[StagePlan], model: ModelId, backend: "Backend") -> bool:
    """Return whether a model is trained to its end and undamaged."""
    with contextlib.suppress(AlmaError):
        return is_trained(folder, plans, model, backend)
    return False


def require_models(folder: RunFolder, plans: Sequence[StagePlan], stage: int, backend: "Backend") -> None:
    """Check that the models of other stages that a stage needs are there.

    Raises:
        AlmaError: names the first model that is missing, and all stages that must run again: the weights that they
            start from may be gone as well.
    """

    def is_lost(model: ModelId) -> bool:
        return not has_weights(folder, plans, model, backend)

    def lost_for(index: int) -> list[ModelId]:
        # What a training starts from is asked for first: mostly it is there, and how far the training is, unread.
        starts = [(each.start, each.model) for each in plans[index].trainings if each.start is not None]
        lost = [start for start, model in starts if is_lost(start) and is_lost(model)]
        return lost + [model for model in plans[index].predictors if model.stage != index and is_lost(model)]

    lost = lost_for(stage)
    if not lost:
        return
    again: set[int] = set()
    left = [*lost]
    while left:
        if (index := left.pop().stage) not in again:
            again.add(index)
            left += lost_for(index)
    path = folder.checkpoint(lost[0])
    stages = ", ".join(str(folder.stage_folder(each)) for each in sorted(again))
    raise AlmaError(
        f"{path}: {'damaged' if path.is_file() else 'not there'}, but a later stage needs it; remove {stages} to train "
        f"{'that stage' if len(again) == 1 else 'those stages'} again"
    )


class NeededModels:
    """Which models' weights must stay on disk after a stage.

    Args:
        plans: all plans of the run, in order.
        kept: arrivals after which the model that predicts stays for good.

    Attributes:
        is_told: whether the user was told that others are removed.
        planned: all models that the run trains; no other is removed.
    """

    def __init__(self, plans: Sequence[StagePlan], kept: Iterable[int] = ()) -> None:
        self.is_told = False
        self.planned = {training.model for plan in plans for training in plan.trainings}
        self._there: Optional[tuple[int, set[ModelId]]] = None  # after which stage, which models had files
        self.last_use: dict[ModelId, int] = {}
        for plan in plans:  # in order, so that later uses replace earlier ones
            index = plan.stage.index
            starts = [training.start for training in plan.trainings if training.start is not None]
            # What a stage starts from must be there when the stage before is complete: a use one stage earlier.
            self.last_use.update({start: max(self.last_use.get(start, 0), index - 1) for start in starts})
            self.last_use.update(dict.fromkeys(plan.predictors, index))
        for arrival in kept:
            updates = [plan for plan in plans if plan.stage.last_arrival <= arrival]
            if updates:
                self.last_use.update(dict.fromkeys(updates[-1].predictors, len(plans)))

    def after(self, done: int) -> list[ModelId]:
        """Return what predicts after stage ``done``, and what later stages start from or predict with, in order."""
        return sorted(model for model, last in self.last_use.items() if model.stage <= done <= last)

    def to_tidy(self, folder: RunFolder, done: int) -> tuple[range, list[ModelId], list[ModelId]]:
        """Return in which stages there may be something to remove after stage ``done``, what stays, and what goes.

        All stages are looked at the first time; from then on only what is new since.
        """
        needed = self.after(done)
        if self._there is None or done < self._there[0]:
            first, there = 0, {model for stage in range(done + 1) for model in folder.members(stage)} & self.planned
        else:
            first, there = self._there
            there = there | {model for model in self.planned if first < model.stage <= done}
        self._there = done, {*needed}
        return range(first, done + 1), needed, sorted(there - {*needed})
