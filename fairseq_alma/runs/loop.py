"""Algorithm 1, once, for every learner and every kind of data; a stage is a list of steps.

Source: Algorithm 1 of the paper. What is trained and what predicts comes as plans (`learners`); how it is trained and
tested are the steps of the back end: commands in forked processes for text, a training loop in this process for
images. A step knows whether it is done, what ``--dry-run`` prints for it, and how it runs; a model is trained when the
steps that train it are done.
"""

import contextlib
import operator
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.needed_models import NeededModels, has_weights, is_trained, require_models
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder
from fairseq_alma.terminal import print_line
from fairseq_alma.watch.run_display import RunDisplay

OF_ALL_TRAININGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "num_updates": max,
    "train_tokens": operator.add,
    "train_images": operator.add,
    "train_flops": operator.add,
}
"""How the costs of two trainings of a stage become the cost of the stage."""


@dataclass(frozen=True)
class StageWork:
    """One stage of one run that is to be completed, under its lock.

    Attributes:
        folder: of the run.
        plan: of the stage.
        display: shows what is done.
        locks: file descriptors; a process that inherits them keeps the stage locked as long as it lives.
        in_step: the same stage of all runs that are in step, this one included: one network may learn for all.
    """

    folder: RunFolder
    plan: StagePlan
    display: RunDisplay
    locks: Sequence[int]
    in_step: "Sequence[StageWork]" = field(default=(), repr=False, compare=False)


class Step(Protocol):
    """A part of a stage. It can be repeated: what is done is not done again; after a kill it resumes where it can."""

    @property
    def trains(self) -> Sequence[ModelId]:
        """The models whose training it is part of; none: it comes after all trainings."""
        return ()

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether nothing is left to do; with several models that it trains, for one of them.

        Raises:
            AlmaError: a file that it made is damaged.
        """
        return False

    def commands(self) -> Sequence[object]:
        """Return what is run, for ``--dry-run``: each, as a string, is what a shell takes."""
        return ()

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Do what is not done yet, and return its part of ``stage.json``; see `OF_ALL_TRAININGS`."""


class Backend(Protocol):
    """How stages are carried out on one kind of data."""

    def steps(self, folder: RunFolder, plan: StagePlan) -> Sequence[Step]:
        """Return the steps of a stage of a run, in order: the same number in each of several runs in step."""

    def keep_only(self, folder: RunFolder, stages: range, needed: Sequence[ModelId], gone: Sequence[ModelId]) -> None:
        """Remove the weights that no later stage needs; see `NeededModels.to_tidy`.

        Args:
            folder: of the run.
            stages: complete ones, in whose folders there may be something to remove.
            needed: models that stay.
            gone: models that go.
        """


@dataclass(frozen=True)
class Run:
    """One run: of one learner and one seed.

    Attributes:
        folder: its run.json is there already.
        plans: of all stages of the stream.
        display: shows every stage.
        evaluate: returns what the record of a stage has in addition to what the back end measures.
    """

    folder: RunFolder
    plans: Sequence[StagePlan]
    display: RunDisplay
    evaluate: Callable[[StageWork], Mapping[str, Any]] = lambda work: {}


def run_stages(
    runs: Sequence[Run],
    backend: Backend,
    only: Optional[int] = None,
    keep_checkpoints: bool = False,
    await_models: Callable[[StagePlan], None] = lambda plan: None,
    keep: Sequence[int] = (),
) -> list[int]:
    """Run the stages that are not complete yet, in order.

    Args:
        runs: with the same stages; a stage is trained for all of them, then the next one.
        backend: trains and tests.
        only: run this stage alone; None: all.
        keep_checkpoints: remove nothing.
        await_models: returns when other processes have trained the models of a stage.
        keep: arrivals whose models stay.

    Returns:
        Number of stages that ran, of each run.
    """
    needed = [None if keep_checkpoints else NeededModels(run.plans, keep) for run in runs]
    complete: list[set[int]] = [set() for _ in runs]
    num_run = [0] * len(runs)
    for stage in [plan.stage.index for plan in runs[0].plans if only in (None, plan.stage.index)]:
        for run, known in zip(runs, complete, strict=True):
            if _complete_record(run.folder, run.plans[stage]) is None:
                _require_starts(run.folder, run.plans[stage], known)
                require_models(run.folder, run.plans, stage, backend)
                await_models(run.plans[stage])
        ran = _finish_stage(runs, stage, backend, needed)
        for number, did_run in enumerate(ran):
            complete[number].add(stage)
            num_run[number] += did_run
    return num_run


def train_members(run: Run, members: Sequence[int], backend: Backend, only: Optional[int] = None) -> None:
    """Train some members, in the stages that are not complete yet; others may be trained at the same time.

    No stage becomes complete by it: that takes `run_stages`, which finds all members there.

    Args:
        run: of the members.
        members: their numbers; stages that train none of them are skipped.
        backend: trains.
        only: train them in this stage alone; None: in all.
    """
    for plan in run.plans:
        trainings = [each for each in plan.trainings if each.model.member in members]
        if not trainings or only not in (None, plan.stage.index):
            continue
        if (record := _complete_record(run.folder, plan)) is not None:
            run.display.skipped(plan, record)
            continue
        for training in trainings:
            start = training.start
            if (
                start is not None
                and run.folder.read_stage(start.stage) is None
                and not is_trained(run.folder, run.plans, start, backend)
            ):
                raise AlmaError(
                    f"{run.folder.model_folder(start)}: not trained to its end, and member {training.model.member} of "
                    f"stage {plan.stage.index} starts from there; run --stage {start.stage} --member {start.member} "
                    "first"
                )
            with run.folder.lock_member(training.model) as locks:
                clock = run.folder.start_clock(plan.stage.index, training.model.member)
                work = StageWork(run.folder, plan, run.display, locks)
                for step in backend.steps(run.folder, plan):
                    if training.model in step.trains:
                        step.run(work)
                clock.stop()
            run.display.trained(plan, training)


def _finish_stage(
    runs: Sequence[Run], stage: int, backend: Backend, needed: Sequence[Optional[NeededModels]]
) -> list[bool]:
    """Complete a stage in every run: run it unless it is complete, then tidy up; return for each whether it ran."""
    records = [_complete_record(run.folder, run.plans[stage]) for run in runs]
    ran = [False] * len(runs)
    with contextlib.ExitStack() as locks:
        in_step: list[StageWork] = []
        works: dict[int, StageWork] = {}
        for number, run in enumerate(runs):
            if records[number] is not None and run.folder.is_tidy(stage):
                continue
            lock = locks.enter_context(run.folder.lock_stage(stage))
            records[number] = _sound_record(run, stage, backend)  # another alma-stream may have completed it
            if records[number] is None:
                works[number] = StageWork(run.folder, run.plans[stage], run.display, [lock], in_step)
                in_step.append(works[number])
        made = _run_stage([runs[number] for number in works], in_step, backend)
        for number, record in zip(works, made, strict=True):
            records[number], ran[number] = record, True
        for run, found, keeps, did_run in zip(runs, records, needed, ran, strict=True):
            assert found is not None  # read, or made just now
            if not run.folder.is_tidy(stage):
                _tidy(run, stage, backend, keeps)
            show = run.display.completed if did_run else run.display.skipped
            show(run.plans[stage], found)
    return ran


def _run_stage(runs: Sequence[Run], works: Sequence[StageWork], backend: Backend) -> list[dict[str, Any]]:
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
    for run, work, clock, record in zip(runs, works, clocks, records, strict=True):
        seconds = clock.seconds() + work.folder.seconds_of_members(work.plan.stage.index)
        record["wall_seconds"] = round(seconds, 1)
        record.update(run.evaluate(work))
    for work, record in zip(works, records, strict=True):
        work.folder.write_stage(record["stage"], record)
    return records


def _tidy(run: Run, stage: int, backend: Backend, keeps: Optional[NeededModels]) -> None:
    """Remove the weights that no later stage needs, once a stage is complete."""
    if keeps is not None:
        done = stage
        with contextlib.suppress(AlmaError):  # a damaged record; a stage that runs again has complete ones behind it
            while done + 1 < len(run.plans) and run.folder.read_stage(done + 1) is not None:
                done += 1
        stages, stay, gone = keeps.to_tidy(run.folder, done)
        if not keeps.is_told and any(run.folder.checkpoint(model).is_file() for model in gone):
            keeps.is_told = True
            kept = ", ".join(str(number) for number in sorted({model.stage for model in stay}))
            print_line(
                f"{run.folder.root}: only weights stay that the report or a later stage needs (now of stage {kept}); "
                "--keep ARRIVAL keeps those of that arrival, --keep-checkpoints all",
                sys.stderr,
            )
        backend.keep_only(run.folder, stages, stay, gone)
    run.folder.mark_tidy(stage)


def _sound_record(run: Run, stage: int, backend: Backend) -> Optional[dict[str, Any]]:
    """Return the record of a complete stage that is not tidy yet, if its weights are there.

    A crash of the machine may have cut them in half. What they were trained from is there still: the stage runs again.
    """
    plan, folder = run.plans[stage], run.folder
    record = _complete_record(folder, plan)
    if record is not None and not folder.is_tidy(stage):
        lost = [each.model for each in plan.trainings if not has_weights(folder, run.plans, each.model, backend)]
        if lost:
            print_line(f"note: {folder.checkpoint(lost[0])}: gone or damaged, stage {stage} runs again", sys.stderr)
            folder.discard_stage(stage)
            return None
    return record


def _complete_record(folder: RunFolder, plan: StagePlan) -> Optional[dict[str, Any]]:
    """Return the record of a complete stage; raise AlmaError if it is not of this plan."""
    record = folder.read_stage(plan.stage.index)
    if record is not None and record["megabatches"] != list(plan.stage.megabatches):
        raise AlmaError(
            f"{folder.stage_folder(plan.stage.index) / STAGE_RECORD}: trained on mega-batches {record['megabatches']}, "
            f"but the stream as it is now gives this stage {list(plan.stage.megabatches)}; a stream that is to grow "
            "needs --drop-rest; give another --run"
        )
    return record


def _require_starts(folder: RunFolder, plan: StagePlan, complete: set[int]) -> None:
    """Raise AlmaError unless the stages whose weights this one uses are complete."""
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
