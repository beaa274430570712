"""Show the progress of a run on the terminal, and write the results to TensorBoard and Weights & Biases.

On a terminal, `rich.progress` shows the current training run and its remaining time; otherwise the display prints a
line every 15 seconds. Each completed stage prints one line. Displayed stages, arrivals and mega-batches are numbered
from 1; files and options number them from 0. With two options of fairseq-train, alma-stream also writes the results of
each arrival:

- ``--tensorboard-logdir DIR``: the results are in ``DIR/PARENT/RUN/arrivals``, and the logs of fairseq-train are in
  ``DIR/PARENT/RUN/stage-NNN/member-M``.
- ``--wandb-project NAME``: one W&B run for the arrivals and one W&B run for each training run, in one group.
"""

import contextlib
import functools
import hashlib
import importlib.util
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence, SupportsFloat

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.terminal import LOG_EVERY_SECONDS, TERMINAL_EVERY_SECONDS, format_duration, is_terminal, print_line

if TYPE_CHECKING:
    from rich.progress import Progress

TENSORBOARD, WANDB = "--tensorboard-logdir", "--wandb-project"
CURVE_OPTIONS = (TENSORBOARD, WANDB)
PACKAGES = {TENSORBOARD: "tensorboard", WANDB: "wandb"}
COSTS = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")
LOSS_UNITS = {"token": "bits", "image": "nats"}


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[dict[str, float]]:
    """Return one dict of results per arrival, from the end of the first stage to the end of the last complete stage.

    An arrival within a later stage has the results of the previous stage (paper, section 3.1) and zero cost.
    """
    points: list[dict[str, float]] = []
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            break
        for arrival in plan.stage.arrivals[:-1] if points else ():
            points.append({**points[-1], **{f"stage/{name}": 0.0 for name in COSTS}, "arrival": arrival})
        points.append({**_flatten(record), "arrival": plan.stage.arrivals[-1]})
    return points


def _flatten(record: Mapping[str, Any], group: str = "stage/") -> dict[str, float]:
    """Return the numbers of a record, except the stage index, by keys such as ``test/loss`` or ``stage/num_params``."""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group}{name}"] = float(value)
    return figures


def wandb_environment(run: RunFolder, model: Optional[ModelId] = None) -> dict[str, str]:
    """Return environment variables that name the W&B run of a training run, or of the arrivals if ``model`` is None."""
    name = run.name if model is None else f"{run.name}/{run.model_folder(model).relative_to(run.root)}"
    identity = hashlib.sha256(f"{run.root.resolve()} {model}".encode()).hexdigest()[:16]
    return {"WANDB_NAME": name, "WANDB_RUN_GROUP": run.name, "WANDB_RUN_ID": identity, "WANDB_RESUME": "allow"}


class ArrivalCurves:
    """Writer of the results at each arrival to TensorBoard and W&B. Each launch replaces the run's TensorBoard files.

    Raises:
        AlmaError: a package that an option requires is not installed.
    """

    def __init__(self, run: RunFolder, plans: Sequence[StagePlan], options: Mapping[str, str]) -> None:
        self.run, self.plans = run, plans
        self.wanted = {name: options[name] for name in CURVE_OPTIONS if options.get(name)}
        self.num_written = 0
        self.writer: Any = None
        for option, value in self.wanted.items():
            found = importlib.util.find_spec(PACKAGES[option])
            if found is None or found.origin is None:  # a folder named ``wandb`` is not the package
                package = PACKAGES[option]
                raise AlmaError(f"{option} {value}: requires the package {package}; run pip install {package}")

    def catch_up(self, at_end: bool = False) -> None:
        """Write results of new arrivals to TensorBoard and, if ``at_end``, to W&B. On failure, only print a note."""
        try:
            points = arrival_points(self.run, self.plans) if self.wanted else []
            if TENSORBOARD in self.wanted:
                if self.writer is None:
                    from torch.utils.tensorboard import SummaryWriter

                    folder = Path(self.wanted[TENSORBOARD]) / self.run.name / "arrivals"
                    suffix = f".{wandb_environment(self.run)['WANDB_RUN_ID']}"  # another run may have the same name
                    for old in folder.glob(f"events.out.tfevents.*{suffix}"):
                        old.unlink()
                    self.writer = SummaryWriter(str(folder), filename_suffix=suffix)
                for point in points[self.num_written :]:
                    for name, value in point.items():
                        self.writer.add_scalar(name, value, int(point["arrival"]))
                self.writer.flush()
                self.num_written = len(points)
            if WANDB in self.wanted and at_end:
                import wandb

                names = wandb_environment(self.run)
                how: dict[str, Any] = {"id": names["WANDB_RUN_ID"], "group": self.run.name, "resume": "allow"}
                how |= {"name": os.environ.get("WANDB_NAME", self.run.name), "config": self.run.read_run()}
                with wandb.init(project=self.wanted[WANDB], job_type="arrivals", **how) as shown:
                    for point in points:
                        # A resumed W&B run has the arrivals that earlier launches wrote.
                        if point["arrival"] >= shown.step:
                            shown.log(dict(point), step=int(point["arrival"]))
        except Exception as error:
            print_line(f"note: cannot write curves of {self.run.root} ({' '.join(str(error).split())})", sys.stderr)


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Return the title of a stage, such as ``stage 1/2, arrival 3 (mega-batches 1-3)``."""
    first, last = plan.stage.megabatches[0] + 1, plan.stage.megabatches[-1] + 1
    span = f"mega-batch {first}" if first == last else f"mega-batches {first}-{last}"
    return f"stage {plan.stage.index + 1}/{num_stages}, arrival {plan.stage.arrivals[-1] + 1} ({span})"


@dataclass
class TrainingProgress:
    """Progress of the current training run.

    Attributes:
        show: function that displays (number of updates, final number of updates or None, text).
        unit: ``token`` or ``image``.
        max_update: final number of updates; None if not known yet.
        first: (number of updates, time in seconds) at the first call of `update`; None before.
    """

    show: Callable[[int, Optional[int], str], None]
    unit: str
    max_update: Optional[int]
    first: Optional[tuple[int, float]] = None

    def update(
        self, num_updates: int, loss: Optional[SupportsFloat] = None, rate: Optional[SupportsFloat] = None
    ) -> None:
        """Show the progress after an update.

        Args:
            num_updates: number of updates so far.
            loss: bits per token, or nats per image.
            rate: tokens or images per second.
        """
        now = time.monotonic()
        self.first = self.first or (num_updates, now)
        text = [] if loss is None else [f"loss {float(loss):.3f} {LOSS_UNITS[self.unit]}"]
        if rate is not None and math.isfinite(float(rate)):
            text.append(f"{float(rate):,.0f} {self.unit}s/s")
        if self.max_update is not None and num_updates > self.first[0]:
            per_update = (now - self.first[1]) / (num_updates - self.first[0])
            text.append(f"{format_duration(per_update * max(0, self.max_update - num_updates))} left")
        self.show(num_updates, self.max_update, ", ".join(text))


class RunDisplay(contextlib.AbstractContextManager["RunDisplay"]):
    """Display of the progress of a run.

    Args:
        plans: plans of all stages.
        unit: ``token`` or ``image``.
        curves: writer of the results; None to write no results.
        name: prefix of each line, such as ``seed 1,``.
    """

    def __init__(
        self, plans: Sequence[StagePlan], unit: str, curves: Optional[ArrivalCurves] = None, name: str = ""
    ) -> None:
        self.num_stages, self.unit, self.curves, self.name = len(plans), unit, curves, name
        self.is_terminal = is_terminal(sys.stderr)
        self.next = -math.inf
        self.progress: Optional[Progress] = None

    def __exit__(self, kind: Optional[type[BaseException]], *exception: object) -> None:
        if self.curves is not None and (kind is None or issubclass(kind, Exception)):
            self.curves.catch_up(at_end=True)

    @contextlib.contextmanager
    def training(
        self, plan: StagePlan, training: Optional[Training], max_update: Optional[int], done: int = 0
    ) -> Iterator[TrainingProgress]:
        """Show progress from update ``done`` on, and yield the `TrainingProgress`. On images, ``training`` is None."""
        title = self._title(plan, training)
        progress = TrainingProgress(functools.partial(self._show, title), self.unit, max_update)
        self._show(title, done, max_update, "")
        try:
            yield progress
        finally:
            if self.progress is not None:
                self.progress.stop()
                self.progress = None

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

    def _show(self, title: str, done: int, total: Optional[int], text: str) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (TERMINAL_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS)
        if not self.is_terminal:
            count = f"{done:,}" + ("" if total is None else f"/{total:,}")
            print_line(f"{title}: {count} updates" + (f", {text}" if text else ""), sys.stderr)
            return
        if self.progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            before, after = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
            columns = before, BarColumn(), MofNCompleteColumn(), after
            how: dict[str, Any] = {"console": Console(file=sys.stderr), "transient": True, "auto_refresh": False}
            self.progress = Progress(*columns, **how)
            self.progress.add_task(title, text="")
            self.progress.start()
        self.progress.update(self.progress.task_ids[0], total=total, completed=done, text=text, refresh=True)
