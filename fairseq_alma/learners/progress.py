"""One training while it runs: a bar where standard error is a terminal, a line now and then elsewhere.

For any training: a loop in this process calls `StageProgress.update`; for fairseq-train, `fairseq_log` reads its log.
"""

import math
import sys
import time
from typing import Callable, Optional, SupportsFloat

from tqdm import tqdm

LINE_EVERY_SECONDS = 15.0
BAR_EVERY_SECONDS = 0.1
LOSS_UNITS = {"word": "bits", "image": "nats"}

# Seconds of the training in all and those that remain, or None twice -> those that remain of the run.
RunLeft = Callable[[Optional[float], Optional[float]], Optional[float]]


class LinePace:
    """Lets a line through at once, and then none until some seconds have passed.

    Args:
        seconds: between two lines.
    """

    def __init__(self, seconds: float = LINE_EVERY_SECONDS) -> None:
        self.seconds = seconds
        self.next = -math.inf

    def is_due(self) -> bool:
        """Tell whether a line may be shown now; if so, it counts as shown."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + self.seconds
        return True


class StageProgress:
    """Shows one training while it runs.

    `update` may be called after every update: most calls return at once.

    Args:
        title: names stage and member.
        unit: what the learner reads, ``word`` or ``image``; decides what loss and rate are counted in.
        max_update: updates in all; None: not known (yet; the attribute may be set later).
        done: updates that an earlier launch has done.
        pace: of the lines, shared with trainings before and after this one; None: one of its own.
        run_left: forecasts the rest of the run; None: nothing is said of it.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        max_update: Optional[int] = None,
        done: int = 0,
        pace: Optional[LinePace] = None,
        run_left: Optional[RunLeft] = None,
    ) -> None:
        self.title = title
        self.unit = unit
        self.max_update = max_update
        self.done = done
        self.num_updates = done
        self.run_left = run_left
        self.began = time.monotonic()
        self.first: Optional[tuple[int, float]] = None
        self.pace = pace or LinePace()
        self.bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            self.pace = LinePace(BAR_EVERY_SECONDS)
            self.bar = open_bar("{desc} |{bar}|", max_update)
        if self.pace.is_due():
            self._show(None, None)

    def __enter__(self) -> "StageProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

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
        if self.pace.is_due():
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
        figures = [self._count(), *spell_figures(self.unit, loss, rate)]
        figures += [f"{spell_duration(rest)} left"] if rest is not None else []
        run = self.run_left(whole, rest) if self.run_left else None
        figures += [f"{spell_duration(run)} left in the run"] if run is not None else []
        text = f"{self.title}: {', '.join(figures)}"
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
            return
        self.bar.total, self.bar.n = self.max_update, self.num_updates
        self.bar.set_description_str(text)

    def _count(self) -> str:
        if self.max_update is None:
            return f"{self.num_updates:,} updates"
        return f"{self.num_updates:,}/{self.max_update:,} updates"


def open_bar(layout: str, total: Optional[int] = None) -> tqdm:
    """Return a line on the terminal that is written over, and gone when it is closed.

    Args:
        layout: as tqdm's ``bar_format``.
        total: what the bar counts to.
    """
    # tqdm's monitor would be a thread, and forking with threads around asks for trouble.
    tqdm.monitor_interval = 0
    return tqdm(total=total, bar_format=layout, leave=False, dynamic_ncols=True, file=sys.stderr)


def spell_figures(unit: str, loss: Optional[SupportsFloat], rate: Optional[SupportsFloat]) -> list[str]:
    """Spell loss and speed where they are known."""
    shown = [] if loss is None else [f"loss {float(loss):.3f} {LOSS_UNITS[unit]}"]
    if rate is not None and math.isfinite(float(rate)):
        shown.append(f"{float(rate):,.0f} {unit}s/s")
    return shown


def spell_duration(seconds: float) -> str:
    """Spell a duration: ``1:02:05`` for an hour, two minutes and five seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
