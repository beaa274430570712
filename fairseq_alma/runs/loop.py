"""Run Algorithm 1 of the paper for every learner, on text and on images.

The plan of a stage (package ``learners``) lists the models to train and to evaluate. A `Backend` returns the steps of
the stage: commands in forked processes for text, a training loop in this process for images.

On a terminal, `rich.progress` shows the current training run and its remaining time; otherwise the display prints a
line every 15 seconds. Each completed stage prints one line. Displayed stages, arrivals and mega-batches are numbered
from 1; files and options number them from 0.
"""

import contextlib
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Optional, Protocol, Sequence, SupportsFloat

from fairseq_alma.errors import AlmaError, ProcessError
from fairseq_alma.files import synchronise
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.curves import ArrivalCurves
from fairseq_alma.runs.run_folder import MEMBER_CLOCK, STAGE_RECORD, RunFolder, read_clock
from fairseq_alma.terminal import LOG_EVERY_SECONDS, TERMINAL_EVERY_SECONDS, format_duration, is_terminal, print_line

OF_ALL_TRAININGS: Mapping[str, Callable[[Any], Any]] = {  # key of stage.json -> value for all training runs
    "num_updates": max,
    "train_tokens": sum,
    "train_images": sum,
    "train_flops": sum,
}


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Return the title of a stage, such as ``stage 1/2, arrival 3 (mega-batches 1-3)``."""
    first, last = plan.stage.megabatches[0] + 1, plan.stage.megabatches[-1] + 1
    span = f"mega-batch {first}" if first == last else f"mega-batches {first}-{last}"
    return f"stage {plan.stage.index + 1}/{num_stages}, arrival {plan.stage.arrivals[-1] + 1} ({span})"


class RunDisplay(contextlib.AbstractContextManager["RunDisplay"]):
    """Display of the progress of a run.

    Args:
        plans: plans of all stages.
        unit: ``token`` or ``image``.
        curves: writer of the results; None to write no results.
        name: prefix of each line, such as ``seed 1,``.

    Attributes:
        max_update: final number of updates of the current training run; None if not known yet.
    """

    def __init__(
        self, plans: Sequence[StagePlan], unit: str, curves: Optional[ArrivalCurves] = None, name: str = ""
    ) -> None:
        self.num_stages, self.unit, self.curves, self.name = len(plans), unit, curves, name
        self.is_terminal = is_terminal(sys.stderr)
        self.next = -math.inf
        self.max_update: Optional[int] = None
        self.first: Optional[tuple[int, float]] = None  # number of updates and time in seconds at the first `update`
        self.progress: Any = None  # `rich.progress.Progress` on a terminal, once a line was shown

    def __exit__(self, kind: Optional[type[BaseException]], *exception: object) -> None:
        if self.curves is not None and (kind is None or issubclass(kind, Exception)):
            self.curves.catch_up(at_end=True)

    @contextlib.contextmanager
    def training(
        self, plan: StagePlan, training: Optional[Training], max_update: Optional[int], done: int = 0
    ) -> "Iterator[RunDisplay]":
        """Show progress from update ``done`` on; the block calls `update`. On images, ``training`` is None."""
        self.title, self.max_update, self.first = self._title(plan, training), max_update, None
        self._show(done, "")
        try:
            yield self
        finally:
            if self.progress is not None:
                self.progress.stop()
                self.progress = None

    def update(
        self, num_updates: int, loss: Optional[SupportsFloat] = None, rate: Optional[SupportsFloat] = None
    ) -> None:
        """Show the progress of a training run after an update.

        Args:
            num_updates: number of updates so far.
            loss: bits per token, or nats per image.
            rate: tokens or images per second.
        """
        now = time.monotonic()
        self.first = self.first or (num_updates, now)
        text = [] if loss is None else [f"loss {float(loss):.3f} {'bits' if self.unit == 'token' else 'nats'}"]
        if rate is not None and math.isfinite(float(rate)):
            text.append(f"{float(rate):,.0f} {self.unit}s/s")
        if self.max_update is not None and num_updates > self.first[0]:
            per_update = (now - self.first[1]) / (num_updates - self.first[0])
            text.append(f"{format_duration(per_update * max(0, self.max_update - num_updates))} left")
        self._show(num_updates, ", ".join(text))

    def show_activity(self, plan: StagePlan, text: str, training: Optional[Training] = None) -> None:
        """Show an activity other than training, such as ``testing``."""
        if self.is_terminal or time.monotonic() >= self.next:
            self.next = time.monotonic() + LOG_EVERY_SECONDS
            print_line(f"{self._title(plan, training)}: {text}", sys.stderr)

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Print that a member is trained, and how to complete the stage."""
        advice = "run with --jobs 1 instead of --member to complete the stage"
        print_line(f"{self._title(plan, training)}: trained; {advice}", sys.stdout)

    def completed(self, plan: StagePlan, record: Mapping[str, Any], is_new: bool = True) -> None:
        """Print the results of a complete stage; if ``is_new``, also print the stage's cost and write the curves."""
        test, valid = record["test"], record["valid"]
        if "ppl" in test:
            per_byte = f", {test['bits_per_byte']:.3f} bits per byte" if test.get("bits_per_byte") else ""
            result = f"perplexity {test['ppl']:.2f} on test{per_byte}, {valid['ppl']:.2f} on valid"
        else:
            result = f"error {test['error']:.2%} on test, {valid['error']:.2%} on valid"
        if not is_new:
            print_line(f"{self._title(plan)}: already complete, {result}", sys.stdout)
            return
        counts = f"{record['num_updates']:,} updates, {record['num_params']:,} parameters"
        print_line(f"{self._title(plan)}: {result}, {counts}, {format_duration(record['wall_seconds'])}", sys.stdout)
        if self.curves is not None:
            self.curves.catch_up()

    def _title(self, plan: StagePlan, training: Optional[Training] = None) -> str:
        member = "" if training is None or len(plan.trainings) == 1 else f", member {training.model.member}"
        return f"{self.name}{describe_stage(plan, self.num_stages)}{member}"

    def _show(self, done: int, text: str) -> None:
        """Show the number of updates of a training run, if enough time has passed since the last line."""
        now, total = time.monotonic(), self.max_update
        if now < self.next:
            return
        self.next = now + (TERMINAL_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS)
        if not self.is_terminal:
            count = f"{done:,}" + ("" if total is None else f"/{total:,}")
            print_line(f"{self.title}: {count} updates" + (f", {text}" if text else ""), sys.stderr)
            return
        if self.progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress

            columns = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[text]}"
            self.progress = Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
            self.progress.add_task(self.title, text="")
            self.progress.start()
        self.progress.update(self.progress.task_ids[0], total=total, completed=done, text=text, refresh=True)


@dataclass(frozen=True)
class StageWork:
    """A stage of a run that this process has locked and is running.

    Attributes:
        locks: file descriptors of locks. The stage is locked until all processes that hold the descriptors exit.
        in_step: this stage in all runs (seeds) in which it is incomplete; on images, one network can train all seeds.
    """

    folder: RunFolder
    plan: StagePlan
    display: RunDisplay
    locks: Sequence[int]
    in_step: "Sequence[StageWork]" = field(default=(), repr=False, compare=False)


class Step(Protocol):
    """Work of a stage, such as training or evaluation. After a kill, calling `run` again resumes the work."""

    @property
    def trains(self) -> Sequence[ModelId]:
        """Return the models that this step trains; empty for a step that trains none, such as an evaluation."""
        return ()

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether the step is done for ``model`` (None: all models). Raises AlmaError if a file is damaged."""
        return False

    def commands(self) -> Sequence[object]:
        """Return the commands that ``--dry-run`` prints; ``str(command)`` is a shell command."""
        return ()

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Run the step; return entries of stage.json. `OF_ALL_TRAININGS` combines values with the same key."""


class Backend(Protocol):
    """Interface for training and evaluation on one kind of data."""

    def steps(self, folder: RunFolder, plan: StagePlan) -> Sequence[Step]:
        """Return the steps of a stage in order. The number of steps is the same for every seed."""

    def keep_only(
        self, folder: RunFolder, stages: Sequence[int], needed: Sequence[ModelId], gone: Sequence[ModelId]
    ) -> None:
        """Remove weights of ``gone`` models and temporary files of ``stages``; keep weights of ``needed`` models."""


@dataclass(frozen=True)
class Run:
    """A run of one seed with the plans of all stages; ``evaluate`` returns additional entries of stage.json."""

    folder: RunFolder
    plans: Sequence[StagePlan]
    display: RunDisplay
    evaluate: Callable[[StageWork], Mapping[str, Any]] = lambda work: {}

    def is_trained(self, model: ModelId, backend: Backend) -> bool:
        """Return whether the training of a model is complete and the checkpoint of the model is not damaged."""
        steps = backend.steps(self.folder, self.plans[model.stage])
        try:
            return all(step.is_done(model) for step in steps if model in step.trains)
        except ProcessError:
            raise
        except AlmaError:
            return False

    def is_member_trained(self, model: ModelId, backend: Backend) -> bool:
        """Return whether separate training of a member is complete and not older than its stage (see `is_trained`)."""
        clock = read_clock(self.folder.stage_folder(model.stage) / MEMBER_CLOCK.format(model.member))
        has_ended = (clock.spent > 0 and clock.started is None) or self.folder.read_stage(model.stage) is not None
        return has_ended and self.is_trained(model, backend)

    def complete_record(self, stage: int) -> Optional[dict[str, Any]]:
        """Return the record of a complete stage, else None. Raises AlmaError if mega-batches differ from the plan."""
        record, planned = self.folder.read_stage(stage), list(self.plans[stage].stage.megabatches)
        if record is not None and record["megabatches"] != planned:
            raise AlmaError(
                f"{self.folder.stage_folder(stage) / STAGE_RECORD}: expected mega-batches {planned}, found "
                f"{record['megabatches']}; give another --run, and --drop-rest if the stream grows"
            )
        return record


class NeededModels:
    """Models whose weights a later stage, the report or the user needs; ``kept``: arrivals given with ``--keep``."""

    def __init__(self, run: Run, kept: Sequence[int] = ()) -> None:
        self.tidied, plans = -1, run.plans
        self.user_knows = bool(kept)  # whoever gives --keep knows that weights are removed
        self.last_use: dict[ModelId, int] = {}
        for plan in plans:  # a later use replaces an earlier use
            index = plan.stage.index
            # A stage needs its initial weights from the completion of the previous stage on.
            starts = [training.start for training in plan.trainings if training.start is not None]
            self.last_use.update({start: max(self.last_use.get(start, 0), index - 1) for start in starts})
            self.last_use.update(dict.fromkeys(plan.predictors, index))
        for arrival in kept:
            if stages := [plan for plan in plans if plan.stage.arrivals[-1] <= arrival]:
                models, here = stages[-1].predictors, run.folder.stage_folder(stages[-1].stage.index)
                self.last_use.update(dict.fromkeys(models, len(plans)))
                are_kept = all(run.folder.checkpoint(model).is_file() for model in models)
                if not are_kept and (here / STAGE_RECORD).is_file():
                    print_line(f"note: --keep {arrival}: weights of {here} are gone; give a new --run", sys.stderr)

    def after(self, done: int) -> list[ModelId]:
        """Return the sorted models whose weights are needed after the completion of stage ``done``."""
        return sorted(model for model, last in self.last_use.items() if model.stage <= done <= last)

    def tidy(self, run: Run, stage: int, backend: Backend) -> None:
        """Remove weights and temporary files that are not needed after the completion of a stage."""
        done = stage
        with contextlib.suppress(AlmaError):  # the record of a later stage is damaged
            while done + 1 < len(run.plans) and run.folder.read_stage(done + 1) is not None:
                done += 1
        first, self.tidied = self.tidied, done  # -1 in the first call, which also removes files of earlier launches
        stay = self.after(done)

        def is_complete(index: int) -> bool:  # An earlier stage may still train (--stage, --init scratch).
            return (run.folder.stage_folder(index) / STAGE_RECORD).is_file()

        unused = (model for model, last in self.last_use.items() if first <= last < done)
        gone = sorted(model for model in unused if is_complete(model.stage))
        if not self.user_knows and any(run.folder.checkpoint(model).is_file() for model in gone):
            self.user_knows = True
            kept = ", ".join(run.folder.stage_folder(number).name for number in sorted({model.stage for model in stay}))
            print_line(
                f"{run.folder.root}: removing weights that neither the report nor a later stage needs, keeping {kept}; "
                "to keep more, give --keep ARRIVAL (numbered from 0) or --keep-checkpoints",
                sys.stderr,
            )
        backend.keep_only(run.folder, [*filter(is_complete, range(max(0, first), done + 1))], stay, gone)


def run_stages(
    runs: Sequence[Run],
    backend: Backend,
    only: Optional[int] = None,
    keep_checkpoints: bool = False,
    await_models: Callable[[StagePlan], None] = lambda plan: None,
    keep: Sequence[int] = (),
) -> list[int]:
    """Run the incomplete stages in order; each stage runs for all seeds before the next stage.

    Args:
        runs: runs of all seeds.
        backend: training and evaluation on text or on images.
        only: index of the only stage to run; None for all stages.
        keep_checkpoints: whether to keep the weights of all models.
        await_models: function that waits until other processes have trained the models of a stage.
        keep: indices (numbered from 0) of the arrivals whose models are kept.

    Returns:
        Number of stages that this call ran, for each run.
    """
    needed = [None if keep_checkpoints else NeededModels(run, keep) for run in runs]
    complete: set[int] = set()
    num_run = [0] * len(runs)
    for stage in [plan.stage.index for plan in runs[0].plans if only in (None, plan.stage.index)]:
        for run in runs:
            if run.complete_record(stage) is None:
                _require_models(run, stage, complete, backend)
                await_models(run.plans[stage])
        did_run = _finish_stage(runs, stage, backend, needed)
        num_run = [number + did for number, did in zip(num_run, did_run, strict=True)]
        complete.add(stage)
    return num_run


def train_members(run: Run, members: Sequence[int], backend: Backend, only: Optional[int] = None) -> None:
    """Train ``members`` in stage ``only`` or, if None, in all incomplete stages. Other processes can train the rest.

    The stages remain incomplete until `run_stages` evaluates the trained members and writes the stage records.
    """
    for plan in run.plans:
        stage, trainings = plan.stage.index, [each for each in plan.trainings if each.model.member in members]
        if not trainings or only not in (None, stage):
            continue
        if (record := run.complete_record(stage)) is not None:
            run.display.completed(plan, record, is_new=False)
            continue
        for training in trainings:
            start, member = training.start, training.model.member
            if start and run.folder.read_stage(start.stage) is None and not run.is_trained(start, backend):
                raise AlmaError(
                    f"{run.folder.model_folder(start)}: incomplete, but member {member} of stage {stage} needs the "
                    f"weights; run --stage {start.stage} --member {start.member} first"
                )
            # No lock for a trained member: another process may evaluate the stage, for longer than this process waits.
            if not run.is_member_trained(training.model, backend):
                with run.folder.lock_member(training.model) as locks:
                    if run.folder.read_stage(stage) is not None:  # another process has completed the stage
                        break
                    clock = run.folder.start_clock(stage, member)
                    for step in backend.steps(run.folder, plan):
                        if training.model in step.trains:
                            step.run(StageWork(run.folder, plan, run.display, locks))
                    clock.stop()
            run.display.trained(plan, training)


def _finish_stage(
    runs: Sequence[Run], stage: int, backend: Backend, needed: Sequence[Optional[NeededModels]]
) -> list[bool]:
    """Complete a stage of every run and remove unneeded files; return for each run whether this call ran the stage."""
    works: dict[int, StageWork] = {}
    with contextlib.ExitStack() as locks:
        in_step: list[StageWork] = []
        for number, run in enumerate(runs):
            if run.complete_record(stage) is None or not run.folder.is_tidy(stage):
                lock = locks.enter_context(run.folder.lock_stage(stage))
                if not _is_sound(run, stage, backend):  # else another alma-stream has completed the stage
                    works[number] = StageWork(run.folder, run.plans[stage], run.display, [lock], in_step)
        in_step += works.values()
        _run_stage([runs[number] for number in works], in_step, backend)
        for number, (run, keeps) in enumerate(zip(runs, needed, strict=True)):
            if not run.folder.is_tidy(stage):
                if keeps is not None:
                    keeps.tidy(run, stage, backend)
                run.folder.mark_tidy(stage)
            record = run.complete_record(stage)
            assert record is not None  # complete before, or written by _run_stage
            run.display.completed(run.plans[stage], record, is_new=number in works)
    return [number in works for number in range(len(runs))]


def _run_stage(runs: Sequence[Run], works: Sequence[StageWork], backend: Backend) -> None:
    clocks = [work.folder.start_clock(work.plan.stage.index) for work in works]
    records: list[dict[str, Any]] = [
        {"stage": work.plan.stage.index, "megabatches": list(work.plan.stage.megabatches), "num_updates": 0}
        for work in works
    ]
    for steps in zip(*(backend.steps(work.folder, work.plan) for work in works), strict=True):
        for step, work, record in zip(steps, works, records, strict=True):
            for name, value in step.run(work).items():
                combine = OF_ALL_TRAININGS.get(name)
                record[name] = combine((record[name], value)) if combine is not None and name in record else value
    seconds = [clock.seconds() / len(works) for clock in clocks]  # before all evaluations, which do not count
    for run, work, record, own in zip(runs, works, records, seconds, strict=True):
        record["wall_seconds"] = round(own + work.folder.seconds_of_members(record["stage"]), 1)
        record.update(run.evaluate(work))
    for work, record in zip(works, records, strict=True):  # after all evaluations, as the seeds share the measured time
        work.folder.write_stage(record["stage"], record)


def _is_sound(run: Run, stage: int, backend: Backend) -> bool:
    """Return whether a stage is complete with undamaged weights.

    If a power failure damaged the weights, delete the record. The stage can then run again, because the initial weights
    of the stage exist until the temporary files are removed.
    """
    if run.complete_record(stage) is None:
        return False
    for training in () if run.folder.is_tidy(stage) else run.plans[stage].trainings:
        if not run.is_trained(training.model, backend):
            path = run.folder.checkpoint(training.model)
            print_line(f"note: {path}: missing or damaged; stage {stage} runs again", sys.stderr)
            (run.folder.stage_folder(stage) / STAGE_RECORD).unlink()
            synchronise(run.folder.stage_folder(stage))
            return False
    return True


def _require_models(run: Run, stage: int, complete: set[int], backend: Backend) -> None:
    """Raise AlmaError if a model that a stage starts from or predicts with is incomplete, missing or damaged."""
    plan = run.plans[stage]
    starts = {training.start.stage for training in plan.trainings if training.start is not None}
    predict = {model.stage for model in plan.predictors} - {stage}
    for other in sorted((starts | predict) - complete):
        if run.folder.read_stage(other) is None:
            use, scratch = ("starts from", ", or use --init scratch") if other in starts else ("predicts with", "")
            raise AlmaError(
                f"{run.folder.stage_folder(other) / STAGE_RECORD}: missing, but stage {stage} {use} weights of stage "
                f"{other}; run --stage {other} first{scratch}"
            )
    # Check the initial weights first. If they exist, the trained checkpoint is not read.
    needed = [(each.start, each.model) for each in plan.trainings if each.start is not None]
    needed += [(model, model) for model in plan.predictors if model.stage != stage]
    for start, model in needed:
        is_missing = not run.is_trained(start, backend) and not run.is_trained(model, backend)
        if is_missing and run.folder.read_stage(stage) is None:  # else another alma-stream has completed the stage
            folder = run.folder.stage_folder(start.stage)
            raise AlmaError(
                f"{run.folder.model_folder(start)}: a checkpoint is missing or damaged, but stage {stage} needs it; "
                f"remove {folder / STAGE_RECORD} to complete the stage again or, if it fails, {folder} to train again"
            )
