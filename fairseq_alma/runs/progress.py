"""One training while it runs: a bar where standard error is a terminal, a line now and then elsewhere.

For any training: a loop in this process calls `StageProgress.update`; for fairseq-train, `fairseq_log` reads its log.
"""

import math
import os
import re
import sys
import time
from typing import Callable, Optional, Sequence, SupportsFloat

from tqdm import tqdm

LINE_EVERY_SECONDS = 15.0
BAR_EVERY_SECONDS = 0.1
BAR_COLUMNS = 12  # at least, where there is a bar
USUAL_COLUMNS = 100
LOSS_UNITS = {"word": "bits", "image": "nats"}

# Seconds of the training in all and those that remain, or None twice -> those that remain of the run.
RunLeft = Callable[[Optional[float], Optional[float]], Optional[float]]


class Screen:
    """Where progress is shown: a line of the terminal that is written over, or a line of a log now and then.

    Args:
        every: seconds between two times; None: what suits a terminal or a log.
    """

    def __init__(self, every: Optional[float] = None) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.every = every if every is not None else BAR_EVERY_SECONDS if self.is_terminal else LINE_EVERY_SECONDS
        self.next = -math.inf
        self.bar: Optional[tqdm] = None

    def is_due(self) -> bool:
        """Tell whether something may be shown now; if so, it counts as shown."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + self.every
        return True

    def show(self, text: str, done: int = 0, total: Optional[int] = None, shorter: Sequence[str] = ()) -> None:
        """Show a text, on a terminal with a bar beside it if there is a total.

        Args:
            text: all of it.
            done: updates, for the bar.
            total: updates in all; None: no bar.
            shorter: the same in fewer words each, for a terminal that is too narrow.
        """
        if not self.is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        if self.bar is None:
            # tqdm's monitor would be a thread, and forking with threads around asks for trouble.
            tqdm.monitor_interval = 0
            self.bar = tqdm(bar_format="{desc}", leave=False, ncols=USUAL_COLUMNS, file=sys.stderr)
        self.bar.ncols = _columns()
        room = self.bar.ncols - (0 if total is None else BAR_COLUMNS)
        fitting = (each for each in (text, *shorter) if len(each) <= room)
        self.bar.bar_format = "{desc}" if total is None else "{desc} |{bar}|"
        self.bar.n, self.bar.total = done, total
        self.bar.set_description_str(next(fitting, [text, *shorter][-1]))

    def clear(self) -> None:
        """Leave the terminal's line to somebody else."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _columns() -> int:
    """Return the width of the terminal that standard error is, as far as it says."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):
        return USUAL_COLUMNS


class StageProgress:
    """Shows one training while it runs.

    `update` may be called after every update: most calls return at once.

    Args:
        title: names stage and member.
        unit: what the learner reads, ``word`` or ``image``; decides what loss and rate are counted in.
        max_update: updates in all; None: not known (yet; the attribute may be set later).
        done: updates that an earlier launch has done.
        screen: where it is shown, after other things and before others; None: one of its own.
        run_left: forecasts the rest of the run; None: nothing is said of it.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        max_update: Optional[int] = None,
        done: int = 0,
        screen: Optional[Screen] = None,
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
        self.owns_screen = screen is None
        self.screen = screen or Screen()
        # A training may be long in starting.
        if self.screen.is_due() or self.screen.is_terminal:
            self._show(None, None)

    def __enter__(self) -> "StageProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.owns_screen:
            self.screen.clear()

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
        if self.screen.is_due():
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
        count, known = self._count(), spell_figures(self.unit, loss, rate)
        known += [f"{spell_duration(rest)} left"] if rest is not None else []
        full = [count, *known, *([f"{spell_duration(run)} left in the run"] if run is not None else [])]
        brief = [count.removesuffix(" updates"), *known]
        # Without the mega-batches; then without words that the figures explain themselves; then without the run.
        title = re.sub(r" \([^)]*\)", "", self.title)
        some = [*brief, *([f"run {spell_duration(run)}"] if run is not None else [])]
        shorter = [f"{title}: {', '.join(each)}" for each in (full, some, brief)]
        self.screen.show(f"{self.title}: {', '.join(full)}", self.num_updates, self.max_update, shorter)

    def _count(self) -> str:
        if self.max_update is None:
            return f"{self.num_updates:,} updates"
        return f"{self.num_updates:,}/{self.max_update:,} updates"


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
