"""One training while it runs, how long it and the rest of the run take, and the clock of a stage.

For any training: a loop in this process calls `StageProgress.update`; for fairseq-train, `text.process` reads its log.
The time left is ours, not rich's: rich knows the last steps of one task, while stages differ in their work (with
``--replay`` each is longer than the one before), and earlier launches have done a part of it.
"""

import contextlib
import math
import re
import time
from pathlib import Path
from typing import Callable, Iterable, Mapping, Optional, SupportsFloat

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.records import ClockRecord
from fairseq_alma.terminal import LiveLine, spell_duration

LOSS_UNITS = {"word": "bits", "image": "nats"}

# Seconds of the training in all and those that remain, or None twice -> those that remain of the run.
RunLeft = Callable[[Optional[float], Optional[float]], Optional[float]]


class StageProgress:
    """Shows one training while it runs.

    `update` may be called after every update: most calls return at once.

    Args:
        title: names stage and member.
        unit: what the learner reads, ``word`` or ``image``; decides what loss and rate are counted in.
        max_update: updates in all; None: not known (yet; the attribute may be set later).
        done: updates that an earlier launch has done.
        line: where it is shown, after other things and before others; None: one of its own.
        run_left: forecasts the rest of the run; None: nothing is said of it.

    Attributes:
        took_place: that it did; whoever runs it may find that it cannot, and it is still ahead then.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        max_update: Optional[int] = None,
        done: int = 0,
        line: Optional[LiveLine] = None,
        run_left: Optional[RunLeft] = None,
    ) -> None:
        self.title = title
        self.unit = unit
        self.max_update = max_update
        self.done = done
        self.num_updates = done
        self.run_left = run_left
        self.took_place = True
        self.began = time.monotonic()
        self.first: Optional[tuple[int, float]] = None
        self.line = line or LiveLine()
        # A training may be long in starting.
        if self.line.is_due():
            self._show(None, None)

    def update(
        self, num_updates: int, loss: Optional[SupportsFloat] = None, rate: Optional[SupportsFloat] = None
    ) -> None:
        """Take the figures of the training as it is now.

        Args:
            num_updates: updates since the stage began, those of earlier launches included.
            loss: of the last updates, bits per token or nats per image; a tensor is fetched only when it is shown.
            rate: words or images per second.
        """
        self.num_updates = num_updates
        if self.first is None:
            self.first = num_updates, time.monotonic()
        if self.line.is_due():
            self._show(loss, rate)

    def seconds(self) -> tuple[Optional[float], Optional[float]]:
        """Return the seconds that the training takes, earlier launches included, and those that remain.

        None where nothing can be said yet; the second alone where the number of updates is not known.
        """
        if self.first is None or self.num_updates == self.first[0]:
            return None, None
        now = time.monotonic()
        per_update = (now - self.first[1]) / (self.num_updates - self.first[0])
        whole = now - self.began + per_update * self.done
        if self.max_update is None:
            return whole, None
        rest = per_update * max(0, self.max_update - self.num_updates)
        return whole + rest, rest

    def _show(self, loss: Optional[SupportsFloat], rate: Optional[SupportsFloat]) -> None:
        whole, rest = self.seconds()
        run = self.run_left(whole, rest) if self.run_left else None
        count = f"{self.num_updates:,}" + ("" if self.max_update is None else f"/{self.max_update:,}")
        figures = spell_figures(self.unit, loss, rate)
        left = [f"{spell_duration(rest)} left"] if rest is not None else []
        whole_run = [f"{spell_duration(run)} left in the run"] if run is not None else []
        full = [f"{count} updates", *figures, *left, *whole_run]
        # Without the mega-batches, then without the arrival.
        brief = re.sub(r" \([^)]*\)", "", self.title)
        bare = re.sub(r", arrival \d+", "", brief)
        spellings = [
            (self.title, full), (brief, full),
            (brief, [count, *figures, *left, *([f"run {spell_duration(run)}"] if run is not None else [])]),
            (brief, [count, *figures, *left]), (bare, [count, *figures, *left]), (bare, [count, *figures[:1], *left]),
            (bare, [count, *left]),
        ]  # fmt: skip
        text, *others = [f"{title}: {', '.join(words)}" for title, words in spellings]
        self.line.show(text, self.num_updates, self.max_update, others)


def spell_figures(unit: str, loss: Optional[SupportsFloat], rate: Optional[SupportsFloat]) -> list[str]:
    """Spell loss and speed where they are known."""
    shown = [] if loss is None else [f"loss {float(loss):.3f} {LOSS_UNITS[unit]}"]
    if rate is not None and math.isfinite(float(rate)):
        shown.append(f"{float(rate):,.0f} {unit}s/s")
    return shown


class Forecast:
    """Forecasts the seconds that remain of a run.

    Trainings are taken to last as long as their work says, and what comes with them (growth, tests) likewise.

    Args:
        work: of each training that lies ahead, in any unit: updates, images, words.
    """

    def __init__(self, work: Mapping[ModelId, float]) -> None:
        self.ahead = dict(work)
        self.work = 0.0
        self.seconds = 0.0

    def finish(self, models: Iterable[ModelId], seconds: float) -> None:
        """Note that the trainings of some models took this long; of none: what comes beside trainings."""
        self.work += sum(self.ahead.pop(model, 0.0) for model in models)
        self.seconds += seconds

    def drop(self, models: Iterable[ModelId]) -> None:
        """Leave out trainings that turned out to be there already."""
        for model in models:
            self.ahead.pop(model, None)

    def seconds_left(
        self, now: Iterable[ModelId] = (), whole: Optional[float] = None, rest: Optional[float] = None
    ) -> Optional[float]:
        """Return the seconds that remain of the run; None if nothing is known yet.

        Args:
            now: the models that are trained at this time.
            whole: seconds that their training takes in all; None: not known.
            rest: seconds that remain of that; None: not known.
        """
        ahead = sum(self.ahead.values())
        here = sum(self.ahead.get(model, 0.0) for model in now)
        if whole is None or rest is None or not here:
            return self.seconds / self.work * ahead if self.work else None
        return rest + (self.seconds + whole) / (self.work + here) * (ahead - here)


class StageClock:
    """Wall time of a stage over all launches, lost work included, the pauses between them not; kept in a file.

    A launch that was killed left no note of its end; the last change of a file in its folder stands for it. What this
    launch takes is no difference of times of day, which a clock that is set changes.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.spent = 0.0
        if self.path.is_file():
            before = read_clock(self.path)
            self.spent = float(before.spent)
            if before.started is not None:
                # A lock has been signed by the launch that asks.
                files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".lock")]
                ended = max((each.stat().st_mtime for each in files), default=0.0)
                self.spent += max(0.0, ended - before.started)
        self.began = time.monotonic()
        self._write(self.spent, time.time())

    def seconds(self) -> float:
        """Return the seconds up to now."""
        return self.spent + time.monotonic() - self.began

    def stop(self) -> None:
        """Note that this launch has ended."""
        self._write(self.seconds(), None)

    def _write(self, spent: float, started: Optional[float]) -> None:
        # A stage of images may take a tenth of a second, which waiting for the disk would double.
        write_json_atomically(self.path, {"spent": spent, "started": started}, durable=False)


def read_clock(path: Path) -> ClockRecord:
    """Read a clock's file; one that is damaged has not run, as nothing but wall time is lost with it."""
    with contextlib.suppress(AlmaError):
        return as_record(read_json_object(path, ""), ClockRecord, path, "")
    return ClockRecord(spent=0.0, started=None)
