"""What a user sees of a whole run: the training at hand, and a line for each complete stage.

A stage may take a tenth of a second or a day: no more lines are written than one can read.
"""

import contextlib
import sys
import time
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

from fairseq_alma.learners.learner import StagePlan, Training
from fairseq_alma.terminal import LiveLine, spell_duration, tell
from fairseq_alma.watch.progress import Forecast, StageProgress
from fairseq_alma.watch.sinks import ArrivalCurves

NUM_AT_ONCE = 10
RESULT_EVERY_SECONDS = 5.0


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Name a stage for people: ``stage 0/1, arrival 2 (mega-batches 0-2)``; all count from 0, as in the files."""
    data = plan.stage.megabatches
    span = f"mega-batch {data[0]}" if len(data) == 1 else f"mega-batches {data[0]}-{data[-1]}"
    return f"stage {plan.stage.index}/{num_stages - 1}, arrival {plan.stage.last_arrival} ({span})"


class HeldLines:
    """Lines at a bearable rate: the first few at once, then one now and then, and always the last.

    Args:
        num_at_once: lines that may come at once.
        seconds: that earn one more line.
    """

    def __init__(self, num_at_once: int = NUM_AT_ONCE, seconds: float = RESULT_EVERY_SECONDS) -> None:
        self.num_at_once = num_at_once
        self.seconds = seconds
        self.earned = float(num_at_once)
        self.since = time.monotonic()
        self.held: Optional[str] = None

    def hold(self, line: str) -> None:
        """Take a line; it takes the place of one that is held back."""
        self.held = line

    def release(self, at_end: bool = False) -> None:
        """Print the line that is held back on standard output, if its time has come or nothing comes after it."""
        now = time.monotonic()
        self.earned = min(self.num_at_once, self.earned + (now - self.since) / self.seconds)
        self.since = now
        if self.held is None or (self.earned < 1 and not at_end):
            return
        self.earned -= 1
        tell(self.held, sys.stdout)
        self.held = None


class RunDisplay:
    """Shows a run; a context manager, whose end prints what is held back. It is the loop's `Reporter`.

    Args:
        plans: of all stages of the run.
        unit: ``word`` or ``image``.
        work: of a training in a stage, in any unit, to forecast the time left.
        only: the one stage that is run; None: all.
        members: those that are trained; None: all.
        curves: show the complete stages elsewhere too.
        name: what every line begins with, of runs that are shown together.
        line: where the training at hand is shown; None: on standard error.
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
        line: Optional[LiveLine] = None,
    ) -> None:
        self.num_stages = len(plans)
        self.num_trainings = {plan.stage.index: len(plan.trainings) for plan in plans}
        self.unit = unit
        self.name = name
        shown = [plan for plan in plans if only in (None, plan.stage.index)]
        models = [(training.model, plan) for plan in shown for training in plan.trainings]
        self.forecast = Forecast(
            {model: work(plan) for model, plan in models if members is None or model.member in members}
        )
        self.curves = curves
        self.line = line or LiveLine()
        self.results = HeldLines()
        # Up to when the forecast knows what the time went into; what is done once, before the first training, is no
        # part of it.
        self.counted: Optional[float] = None

    def __enter__(self) -> "RunDisplay":
        if self.curves is not None:
            self.curves.begin()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *exception: object) -> None:
        self.line.clear()
        self.results.release(at_end=True)
        # Whoever interrupts does not want to wait; the next launch draws what is missing.
        if self.curves is not None and (kind is None or issubclass(kind, Exception)):
            self.curves.end()

    @contextlib.contextmanager
    def training(
        self, plan: StagePlan, training: Optional[Training], max_update: Optional[int], done: int = 0
    ) -> Iterator[StageProgress]:
        """Show one training; if an error ends it, or it does not take place, it is still ahead in the forecast.

        Args:
            plan: of the stage.
            training: of one of its models; None: of all at once.
            max_update: updates in all; None: not known.
            done: updates that an earlier launch has done.
        """
        self.results.release()
        if self.curves is not None:
            self.curves.catch_up()
        if self.counted is None:
            self.counted = time.monotonic()
        models = [each.model for each in plan.trainings if training in (None, each)]
        left = partial(self.forecast.seconds_left, models) if self.forecast.ahead.keys() - models else None
        progress = StageProgress(self._title(plan, training), self.unit, max_update, done, self.line, left)
        yield progress
        if not progress.took_place:
            return
        whole, _ = progress.seconds()
        earlier = max(0.0, whole - (time.monotonic() - progress.began)) if whole is not None else 0.0
        self.forecast.finish(models, self._count_seconds() + earlier)

    def say(self, plan: StagePlan, text: str, training: Optional[Training] = None) -> None:
        """Say what is done now beside training."""
        self.results.release()
        # What is done beside training takes long, and may say nothing for as long.
        if self.line.is_due() or self.line.is_terminal:
            self.line.show(f"{self._title(plan, training)}: {text}")

    def skipped(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage was complete already."""
        self.forecast.finish([training.model for training in plan.trainings], record["wall_seconds"])
        self._tell(plan, f"complete already, {_result(record)}")

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Say that one member of a stage is trained, and that the stage waits for the others."""
        self.forecast.drop([training.model])
        self._tell(
            plan, f"member {training.model.member} is trained; the stage is complete after a call without --member"
        )

    def completed(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage is complete now."""
        self.forecast.finish([], self._count_seconds())
        self.forecast.drop(training.model for training in plan.trainings)
        text = (
            f"{_result(record)}, {record['num_updates']:,} updates, {record['num_params']:,} parameters, "
            f"{spell_duration(record['wall_seconds'])}"
        )
        left = self.forecast.seconds_left() if self.forecast.ahead else None
        self._tell(plan, text if left is None else f"{text}, {spell_duration(left)} left in the run")
        if self.curves is not None:
            self.curves.note_stage()
            self.curves.catch_up()

    def _title(self, plan: StagePlan, training: Optional[Training] = None) -> str:
        title = self.name + describe_stage(plan, self.num_stages)
        shown = plan.trainings if training is None else [training]
        if len(shown) == self.num_trainings[plan.stage.index]:
            return title
        return f"{title}, member {', '.join(str(each.model.member) for each in shown)}"

    def _tell(self, plan: StagePlan, text: str) -> None:
        self.results.hold(f"{self._title(plan)}: {text}")
        self.results.release()

    def _count_seconds(self) -> float:
        """Return the seconds since the last call."""
        now = time.monotonic()
        before, self.counted = self.counted, now
        return 0.0 if before is None else now - before


def _result(record: Mapping[str, Any]) -> str:
    test, valid = record["test"], record["valid"]
    if "ppl" in test:
        return f"perplexity {test['ppl']:.2f} on test, {valid['ppl']:.2f} on valid"
    return f"error {test['error']:.2%} on test, {valid['error']:.2%} on valid"
