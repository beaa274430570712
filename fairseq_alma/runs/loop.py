"""Algorithm 1, once, for every learner and every kind of data; a stage is a list of steps.

Source: Algorithm 1 of the paper. What is trained and what predicts comes as plans (`learners`); how it is trained and
tested are the steps of the back end: commands in processes of their own for text, a training loop in this process for
images. A step knows whether it is done, what ``--dry-run`` prints of it, and how it runs; a model is trained when the
steps are done that train it.
"""

import contextlib
import operator
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Iterable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import write_together
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder
from fairseq_alma.terminal import tell
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


OF_ALL_TRAININGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "num_updates": max,
    "train_tokens": operator.add,
    "train_images": operator.add,
    "train_flops": operator.add,
}
"""How what two trainings of a stage took becomes what the stage took."""


Evaluate = Callable[[StageWork], Mapping[str, Any]]


def nothing_to_evaluate(work: StageWork) -> Mapping[str, Any]:
    """Return nothing: a stage is tested, and that is all."""
    return {}


@dataclass(frozen=True)
class Run:
    """One run: of one learner and one seed.

    Attributes:
        folder: its run.json is there already.
        plans: of all stages of the stream.
        display: is told of every stage.
        evaluate: returns what the record of a stage says beside what the back end does.
    """

    folder: RunFolder
    plans: Sequence[StagePlan]
    display: RunDisplay
    evaluate: Evaluate = nothing_to_evaluate


def nothing_to_await(plan: StagePlan) -> None:
    """Return: no other process trains models."""


def run_stages(
    runs: Sequence[Run],
    backend: Backend,
    only: Optional[int] = None,
    keep_checkpoints: bool = False,
    await_models: Callable[[StagePlan], None] = nothing_to_await,
    keep: Sequence[int] = (),
) -> list[int]:
    """Run the stages that are not complete yet, in order.

    Args:
        runs: with the same stages; a stage is trained for all of them, then the next one.
        backend: trains and tests.
        only: run this stage alone; None: all.
        keep_checkpoints: remove nothing.
        await_models: returns when other processes have trained the models of a stage, as far as they do.
        keep: arrivals whose models stay.

    Returns:
        Number of stages that ran, of each run.
    """
    needed = [None if keep_checkpoints else NeededModels(run.plans, keep) for run in runs]
    complete: list[set[int]] = [set() for _ in runs]
    num_run = [0] * len(runs)
    for stage in [plan.stage.index for plan in runs[0].plans if only in (None, plan.stage.index)]:
        ran = _finish_stage(runs, stage, backend, needed, complete, await_models)
        for number, did_run in enumerate(ran):
            complete[number].add(stage)
            num_run[number] += did_run
    return num_run


def train_members(
    run: Run,
    members: Sequence[int],
    backend: Backend,
    only: Optional[int] = None,
) -> None:
    """Train some members, in the stages that are not complete yet; others may be trained at the same time.

    No stage becomes complete by it: that takes `run_stages`, which finds all members there.

    Args:
        run: of the members.
        members: their numbers; stages that train none of them are passed over.
        backend: trains.
        only: train them in this stage alone; None: in all.
    """
    for plan in run.plans:
        trainings = [each for each in plan.trainings if each.model.member in members]
        if not trainings or only not in (None, plan.stage.index):
            continue
        record = _complete_record(run.folder, plan)
        if record is not None:
            run.display.skipped(plan, record)
            continue
        for training in trainings:
            _require_trained(run, plan, training, backend)
            with run.folder.lock_member(training.model) as locks:
                clock = run.folder.start_clock(plan.stage.index, training.model.member)
                work = StageWork(run.folder, plan, run.display, locks)
                for step in backend.steps(run.folder, plan):
                    if training.model in step.trains:
                        step.run(work)
                clock.stop()
            run.display.trained(plan, training)


def _require_trained(run: Run, plan: StagePlan, training: Training, backend: Backend) -> None:
    """Raise AlmaError unless the model that a member starts from is trained."""
    start = training.start
    if start is None or run.folder.read_stage(start.stage) is not None:
        return
    if is_trained(run.folder, run.plans, start, backend):
        return
    raise AlmaError(
        f"{run.folder.model_folder(start)}: not trained to its end, and member {training.model.member} of stage "
        f"{plan.stage.index} starts from there; run --stage {start.stage} --member {start.member} first"
    )


def _finish_stage(
    runs: Sequence[Run],
    stage: int,
    backend: Backend,
    needed: Sequence[Optional[NeededModels]],
    complete: Sequence[set[int]],
    await_models: Callable[[StagePlan], None],
) -> list[bool]:
    """Bring a stage to its end in every run: run it unless it is complete, then tidy up.

    Args:
        runs: see `run_stages`.
        stage: its number.
        backend: trains and tests.
        needed: for each run which weights must stay; None: all.
        complete: for each run the stages that are known to be complete.
        await_models: see `run_stages`.

    Returns:
        For each run whether the stage ran.
    """
    records = [_complete_record(run.folder, run.plans[stage]) for run in runs]
    for run, record, known in zip(runs, records, complete, strict=True):
        if record is None:
            _require_starts(run.folder, run.plans[stage], known)
            require_models(run.folder, run.plans, stage, backend)
            await_models(run.plans[stage])
    ran = [False] * len(runs)
    with contextlib.ExitStack() as locks:
        beside: list[StageWork] = []
        works: dict[int, StageWork] = {}
        for number, run in enumerate(runs):
            if records[number] is not None and run.folder.is_tidy(stage):
                continue
            lock = locks.enter_context(run.folder.lock_stage(stage))
            # Another alma-stream may have completed it in the meantime.
            records[number] = _sound_record(run, stage, backend)
            if records[number] is None:
                works[number] = StageWork(run.folder, run.plans[stage], run.display, [lock], beside)
                beside.append(works[number])
        made = _run_stage(beside, [runs[number].evaluate for number in works], backend)
        for number, record in zip(works, made, strict=True):
            records[number], ran[number] = record, True
        for run, record, keeps, did_run in zip(runs, records, needed, ran, strict=True):
            assert record is not None  # read, or made just now
            if not run.folder.is_tidy(stage):
                run.folder.require_in_place()
                if keeps is not None:
                    done = _last_in_a_row(run, stage)
                    stages, stay, gone = keeps.to_tidy(run.folder, done)
                    _tell_what_goes(run, keeps, stay, gone)
                    backend.keep_only(run.folder, stages, stay, gone)
                run.folder.mark_tidy(stage)
            show = run.display.completed if did_run else run.display.skipped
            show(run.plans[stage], record)
    return ran


def _tell_what_goes(run: Run, keeps: NeededModels, needed: Sequence[ModelId], gone: Sequence[ModelId]) -> None:
    """Say once that weights are removed, and which stay."""
    if keeps.is_told or not any(run.folder.checkpoint(model).is_file() for model in gone):
        return
    keeps.is_told = True
    stages = ", ".join(str(stage) for stage in sorted({model.stage for model in needed}))
    tell(
        f"{run.folder.root}: only weights stay that the report or a later stage needs (now of stage {stages}); "
        "--keep ARRIVAL keeps those of that arrival, --keep-checkpoints all",
        sys.stderr,
    )


def _last_in_a_row(run: Run, stage: int) -> int:
    """Return the last of the stages that are complete from this one on; a stage that runs again has some behind it."""
    with contextlib.suppress(AlmaError):  # of a damaged record, which tells nothing
        while stage + 1 < len(run.plans) and run.folder.read_stage(stage + 1) is not None:
            stage += 1
    return stage


def _run_stage(works: Sequence[StageWork], evaluate: Sequence[Evaluate], backend: Backend) -> list[dict[str, Any]]:
    """Train and test one stage of some runs, step by step, and write the record of each last."""
    clocks = [work.folder.start_clock(work.plan.stage.index) for work in works]
    records: list[dict[str, Any]] = [
        {"stage": work.plan.stage.index, "megabatches": list(work.plan.stage.megabatches), "num_updates": 0}
        for work in works
    ]
    for steps in zip(*(backend.steps(work.folder, work.plan) for work in works), strict=True):
        for step, work, record in zip(steps, works, records, strict=True):
            for name, value in step.run(work).items():
                add = OF_ALL_TRAININGS.get(name)
                record[name] = add(record[name], value) if add is not None and name in record else value
    for work, clock, record, figures in zip(works, clocks, records, evaluate, strict=True):
        seconds = clock.seconds() + work.folder.seconds_of_members(work.plan.stage.index)
        record["wall_seconds"] = round(seconds, 1)
        record.update(figures(work))
    write_together(
        [partial(work.folder.write_stage, record["stage"], record) for work, record in zip(works, records, strict=True)]
    )
    return records


def _sound_record(run: Run, stage: int, backend: Backend) -> Optional[dict[str, Any]]:
    """Return the record of a complete stage that is not tidy yet, once it is sure that its weights are there.

    A crash of the machine may have cut them in half. What they were trained from is there still: the stage runs again.
    """
    plan, folder = run.plans[stage], run.folder
    record = _complete_record(folder, plan)
    if record is not None and not folder.is_tidy(stage):
        lost = [each.model for each in plan.trainings if not has_weights(folder, run.plans, each.model, backend)]
        if lost:
            tell(f"note: {folder.checkpoint(lost[0])}: gone or damaged, stage {stage} runs again", sys.stderr)
            folder.discard_stage(stage)
            return None
    return record


def _complete_record(folder: RunFolder, plan: StagePlan) -> Optional[dict[str, Any]]:
    """Return the record of a complete stage, once it is sure that it is the record of this plan."""
    record = folder.read_stage(plan.stage.index)
    if record is None:
        return None
    path = folder.stage_folder(plan.stage.index) / STAGE_RECORD
    if record["megabatches"] != list(plan.stage.megabatches):
        raise AlmaError(
            f"{path}: trained on mega-batches {record['megabatches']}, but the stream as it is now gives this "
            f"stage {list(plan.stage.megabatches)}; a stream that is to grow needs --drop-rest; give another --run"
        )
    return record


def _require_starts(folder: RunFolder, plan: StagePlan, complete: set[int]) -> None:
    """Raise AlmaError unless the stages that this one takes weights from are complete."""
    starts = {training.start.stage for training in plan.trainings if training.start is not None}
    others = {model.stage for model in plan.predictors} - {plan.stage.index}
    for stage in sorted((starts | others) - complete):
        if folder.read_stage(stage) is None:
            use, remedy = "predicts with", "run that stage first"
            if stage in starts:
                use, remedy = "starts from", "run that stage first, or use --init scratch"
            raise AlmaError(
                f"{folder.stage_folder(stage) / STAGE_RECORD}: not there, and stage {plan.stage.index} {use} "
                f"the weights of stage {stage}; {remedy}"
            )
