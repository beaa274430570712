"""A stage as a list of steps, each of which knows whether it is done, what ``--dry-run`` prints of it, and how it runs.

A back end says what the steps are; the rest asks these: the loop runs them, ``--dry-run`` prints them, and a model is
trained when the steps are done that train it.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import ModelId, StagePlan
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.run_display import RunDisplay


@dataclass(frozen=True)
class StageWork:
    """One stage of one run that is to be completed, under its lock.

    Attributes:
        folder: of the run.
        plan: of the stage.
        display: shows what is done.
        locks: file descriptors; a process that inherits them keeps the stage locked as long as it lives.
        beside: the same stage of all runs that are in step, this one too: one network may learn for all; none: alone.
    """

    folder: RunFolder
    plan: StagePlan
    display: RunDisplay
    locks: Sequence[int]
    beside: "Sequence[StageWork]" = field(default=(), repr=False, compare=False)


class Step(Protocol):
    """A part of a stage. It can be repeated: what is done is not done again; after a kill it resumes where it can.

    One that derives from it says of `trains`, `is_done` and `commands` what differs from a test that this process runs.
    """

    @property
    def trains(self) -> Sequence[ModelId]:
        """The models of whose training it is a part; none: it comes after all trainings."""
        return ()

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Tell whether nothing is left to do; of several models that it trains, for one of them.

        Raises:
            AlmaError: a file that it made is damaged.
        """
        return False

    def commands(self) -> Sequence[object]:
        """Return what is run, for ``--dry-run``: each is, as a string, what a shell takes."""
        return ()

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Do what is not done yet.

        Returns:
            What ``stage.json`` says of it. Of several trainings ``num_updates`` is the most, and ``train_tokens`` (or
            ``train_images``) and ``train_flops`` add up.
        """


class Backend(Protocol):
    """How stages are carried out on one kind of data."""

    def steps(self, folder: RunFolder, plan: StagePlan) -> Sequence[Step]:
        """Return the steps of a stage of a run, in order: as many in each run, where several are in step."""

    def keep_only(self, folder: RunFolder, stages: range, needed: Sequence[ModelId], gone: Sequence[ModelId]) -> None:
        """Remove the weights that no later stage needs; see `NeededModels.to_tidy`.

        Args:
            folder: of the run.
            stages: complete ones, in whose folders there may be something to remove.
            needed: models that stay.
            gone: models that go.
        """


def is_trained(folder: RunFolder, plans: Sequence[StagePlan], model: ModelId, backend: Backend) -> bool:
    """Tell whether a model is trained to its end.

    Args:
        folder: of the run.
        plans: of all its stages.
        model: of one of these.
        backend: knows the steps.

    Raises:
        AlmaError: a checkpoint is damaged.
    """
    steps = backend.steps(folder, plans[model.stage])
    return all(step.is_done(model) for step in steps if model in step.trains)


def has_weights(folder: RunFolder, plans: Sequence[StagePlan], model: ModelId, backend: Backend) -> bool:
    """Tell whether a model is trained to its end and undamaged; see `is_trained`."""
    with contextlib.suppress(AlmaError):
        return is_trained(folder, plans, model, backend)
    return False


def require_models(folder: RunFolder, plans: Sequence[StagePlan], stage: int, backend: Backend) -> None:
    """Raise AlmaError unless the models of other stages that a stage needs are there.

    Args:
        folder: of the run.
        plans: of all its stages.
        stage: that is about to run.
        backend: knows the steps.

    Raises:
        AlmaError: names the first model that is not there, and all stages that must run again: the weights that they
            start from may be gone as well.
    """

    def lost_for(index: int) -> list[ModelId]:
        """Return the models of other stages that are gone and that a stage starts from, or predicts with."""

        def is_lost(model: ModelId) -> bool:
            return not has_weights(folder, plans, model, backend)

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
    which = "that stage" if len(again) == 1 else "those stages"
    raise AlmaError(
        f"{path}: {'damaged' if path.is_file() else 'not there'}, but a later stage needs it; remove "
        f"{', '.join(str(folder.stage_folder(each)) for each in sorted(again))} to train {which} again"
    )


class NeededModels:
    """Which models' weights must stay on disk after a stage.

    Args:
        plans: all plans of the run, in order.
        kept: arrivals after which the model that predicts stays for good.

    Attributes:
        is_told: whether it was said that others go.
        planned: all models that the run trains: no other is its own to remove.
    """

    def __init__(self, plans: Sequence[StagePlan], kept: Iterable[int] = ()) -> None:
        self.is_told = False
        self.planned = {training.model for plan in plans for training in plan.trainings}
        self._there: Optional[tuple[int, set[ModelId]]] = None  # after which stage what had files
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
        """Return where something may be to remove after stage ``done``, which models stay, and which go.

        All stages are looked at the first time; from then on what is new since.
        """
        needed = self.after(done)
        if self._there is None or done < self._there[0]:
            first, there = 0, {model for stage in range(done + 1) for model in folder.members(stage)} & self.planned
        else:
            first, there = self._there
            there = there | {model for model in self.planned if first < model.stage <= done}
        self._there = done, {*needed}
        return range(first, done + 1), needed, sorted(there - {*needed})
