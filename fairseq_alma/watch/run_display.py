"""What a user sees of a run: the training at hand with the time left, and one line for each complete stage.

On a terminal `rich.progress` draws the training; elsewhere a line is printed every 15 seconds. Stages, arrivals and
mega-batches are counted from 1 here, from 0 in files and options.
"""

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence, SupportsFloat

from fairseq_alma.learners.learner import StagePlan, Training
from fairseq_alma.terminal import format_duration, is_terminal, print_line
from fairseq_alma.watch.arrivals import ArrivalCurves

if TYPE_CHECKING:
    from rich.progress import Progress

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
RESULTS_AT_ONCE, RESULT_EVERY_SECONDS = 10, 5.0
LOSS_UNITS = {"token": "bits", "image": "nats"}


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Return ``stage 1/2, arrival 3 (mega-batches 1-3)``."""
    first, last = plan.stage.megabatches[0] + 1, plan.stage.megabatches[-1] + 1
    span = f"mega-batch {first}" if first == last else f"mega-batches {first}-{last}"
    return f"stage {plan.stage.index + 1}/{num_stages}, arrival {plan.stage.last_arrival + 1} ({span})"


class TrainingProgress:
    """One training while it runs.

    Args:
        show: called with updates, their final number or None, and the text, not more often than can be read.
        unit: ``token`` or ``image``.
        max_update: final number of updates; None: not known yet (the attribute may be set later).
        done: updates of earlier launches.
    """

    def __init__(
        self, show: Callable[[int, Optional[int], str], None], unit: str, max_update: Optional[int], done: int
    ) -> None:
        self.show, self.unit, self.max_update, self.done = show, unit, max_update, done
        self.num_updates = done
        self.first: Optional[tuple[int, float]] = None

    def update(
        self, num_updates: int, loss: Optional[SupportsFloat] = None, rate: Optional[SupportsFloat] = None
    ) -> None:
        """Take the figures of the training after an update.

        Args:
            num_updates: updates of the stage, those of earlier launches included.
            loss: bits per token or nats per image; a tensor is read only when it is shown.
            rate: tokens or images per second.
        """
        self.num_updates, now = num_updates, time.monotonic()
        self.first = self.first or (num_updates, now)
        text = [] if loss is None else [f"loss {float(loss):.3f} {LOSS_UNITS[self.unit]}"]
        if rate is not None and math.isfinite(float(rate)):
            text.append(f"{float(rate):,.0f} {self.unit}s/s")
        if (left := self.seconds_left) is not None:
            text.append(f"{format_duration(left)} left")
        self.show(num_updates, self.max_update, ", ".join(text))

    @property
    def seconds_left(self) -> Optional[float]:
        """Seconds that remain of this training; None: not known yet."""
        if self.first is None or self.max_update is None or self.num_updates <= self.first[0]:
            return None
        per_update = (time.monotonic() - self.first[1]) / (self.num_updates - self.first[0])
        return per_update * max(0, self.max_update - self.num_updates)


class RunDisplay:
    """Shows a run; a context manager.

    Args:
        plans: of all stages of the run.
        unit: ``token`` or ``image``.
        work: returns the work of a training in a stage, in any unit, to forecast the time left.
        only: the one stage that is run; None: all.
        members: those that are trained; None: all.
        curves: of the complete stages.
        name: begins every line, for runs that are shown together.
    """

    def __init__(
        self,
        plans: Sequence[StagePlan],
        unit: str,
        work: Callable[[StagePlan], float] = lambda plan: 1.0,
        only: Optional[int] = None,
        members: Optional[Sequence[int]] = None,
        curves: Optional[ArrivalCurves] = None,
        name: str = "",
    ) -> None:
        self.num_stages, self.unit, self.curves, self.name = len(plans), unit, curves, name
        chosen = [plan for plan in plans if only in (None, plan.stage.index)]
        trainings = [(each.model, work(plan)) for plan in chosen for each in plan.trainings]
        self.ahead = {model: cost for model, cost in trainings if members is None or model.member in members}
        self.work, self.seconds = 0.0, 0.0
        self.is_terminal = is_terminal(sys.stderr)
        self.next = -math.inf
        self.progress: Optional[Progress] = None
        self.results, self.since, self.held = float(RESULTS_AT_ONCE), time.monotonic(), ""

    def __enter__(self) -> "RunDisplay":
        if self.curves is not None:
            self.curves.begin()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *exception: object) -> None:
        self._release(at_end=True)
        if self.curves is not None and (kind is None or issubclass(kind, Exception)):
            self.curves.catch_up(at_end=True)

    @contextlib.contextmanager
    def training(
        self, plan: StagePlan, training: Optional[Training], max_update: Optional[int], done: int = 0
    ) -> Iterator[TrainingProgress]:
        """Show one training.

        Args:
            plan: of the stage.
            training: of one of its models; None: of all at once.
            max_update: final number of updates; None: not known.
            done: updates of an earlier launch.
        """
        self._release()
        began, title = time.monotonic(), self._title(plan, training)
        models = [each.model for each in plan.trainings if training in (None, each)]
        here = sum(self.ahead.get(model, 0.0) for model in models)

        def show(num_updates: int, total: Optional[int], text: str) -> None:
            left, rest = progress.seconds_left, sum(self.ahead.values()) - here
            if left is not None and rest > 0 and here > 0:
                taken = (self.seconds + time.monotonic() - began + left) / (self.work + here)
                text += f", {format_duration(left + taken * rest)} left in the run"
            self._show(title, num_updates, total, text)

        progress = TrainingProgress(show, self.unit, max_update, done)
        show(done, max_update, "")
        try:
            yield progress
        finally:
            self._stop()
        self.work += here
        self.seconds += time.monotonic() - began
        for model in models:
            self.ahead.pop(model, None)

    def say(self, plan: StagePlan, text: str, training: Optional[Training] = None) -> None:
        """Show what is done now apart from training."""
        self._release()
        if self.is_terminal or time.monotonic() >= self.next:
            self.next = time.monotonic() + LOG_EVERY_SECONDS
            print_line(f"{self._title(plan, training)}: {text}", sys.stderr)

    def skipped(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Show that a stage was complete already."""
        self._finish(plan)
        self._result(plan, f"complete already, {_result(record)}")

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Show that one member of a stage is trained, and that the stage waits for the others."""
        member = training.model.member
        self._result(plan, f"member {member} is trained; the stage is complete after a call without --member")

    def completed(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Show that a stage is complete now."""
        self._finish(plan)
        text = f"{_result(record)}, {record['num_updates']:,} updates, {record['num_params']:,} parameters, "
        self._result(plan, text + format_duration(record["wall_seconds"]))
        if self.curves is not None:
            self.curves.catch_up()

    def _finish(self, plan: StagePlan) -> None:
        for training in plan.trainings:
            self.ahead.pop(training.model, None)

    def _title(self, plan: StagePlan, training: Optional[Training] = None) -> str:
        title = self.name + describe_stage(plan, self.num_stages)
        alone = training is None or len(plan.trainings) == 1
        return title if alone or training is None else f"{title}, member {training.model.member}"

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

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def _result(self, plan: StagePlan, text: str) -> None:
        self.held = f"{self._title(plan)}: {text}"
        self._release()

    def _release(self, at_end: bool = False) -> None:
        """Print the newest result: the first few at once, then one every few seconds, and always the last."""
        now = time.monotonic()
        self.results = min(RESULTS_AT_ONCE, self.results + (now - self.since) / RESULT_EVERY_SECONDS)
        self.since = now
        if self.held and (self.results >= 1 or at_end):
            self.results -= 1
            print_line(self.held, sys.stdout)
            self.held = ""


def _result(record: Mapping[str, Any]) -> str:
    test, valid = record["test"], record["valid"]
    if "ppl" in test:
        per_byte = f", {test['bits_per_byte']:.3f} bits per byte" if test.get("bits_per_byte") else ""
        return f"perplexity {test['ppl']:.2f} on test{per_byte}, {valid['ppl']:.2f} on valid"
    return f"error {test['error']:.2%} on test, {valid['error']:.2%} on valid"
