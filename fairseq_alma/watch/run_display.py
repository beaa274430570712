"""Show the progress of a run: the current training with its remaining time, and one line for each complete stage.

On a terminal, `rich.progress` shows the training; otherwise the display prints a line every 15 seconds. Displayed
stages, arrivals and mega-batches are numbered from 1; files and options number them from 0.
"""

import contextlib
import functools
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence, SupportsFloat

from fairseq_alma.learners.learner import StagePlan, Training
from fairseq_alma.terminal import format_duration, is_terminal, print_line
from fairseq_alma.watch.arrivals import ArrivalCurves

if TYPE_CHECKING:
    from rich.progress import Progress

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
LOSS_UNITS = {"token": "bits", "image": "nats"}


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Return the title of a stage, such as ``stage 1/2, arrival 3 (mega-batches 1-3)``."""
    first, last = plan.stage.megabatches[0] + 1, plan.stage.megabatches[-1] + 1
    span = f"mega-batch {first}" if first == last else f"mega-batches {first}-{last}"
    return f"stage {plan.stage.index + 1}/{num_stages}, arrival {plan.stage.arrivals[-1] + 1} ({span})"


@dataclass
class TrainingProgress:
    """Progress of the current training.

    Attributes:
        show: function with arguments (number of updates, final number of updates or None, text).
        unit: ``token`` or ``image``.
        max_update: final number of updates; None if not known yet.
        first: (number of updates, time in seconds) at the first call of `update`.
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
        name: prefix of each line.
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
        """Show the progress of a training from update ``done`` on; ``training`` is None if all models train jointly."""
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
        """Print that one member is trained, but the stage is not complete."""
        print_line(f"{self._title(plan, training)}: trained; run without --member to complete the stage", sys.stdout)

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
        duration = format_duration(record["wall_seconds"])
        print_line(f"{self._title(plan)}: {result}, {counts}, {duration}", sys.stdout)
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
