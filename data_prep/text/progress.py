"""Show how far a pass is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Optional

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_STEPS = 1000


class Progress:
    """Words per second and time left of one pass.

    Args:
        title: what the pass does.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._last_line = time.monotonic()
        self._fraction = 0.0
        self._words = 0
        self._bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            layout = "{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed}, {remaining} left]"
            self._bar = tqdm(total=_STEPS, desc=title, bar_format=layout, file=sys.stderr, leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: Optional[type], *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            seconds = time.monotonic() - self._start
            print(f"{self._title}: {self._pace()}, {seconds:.1f} s", file=sys.stderr)

    def update(self, fraction: float, words: int) -> None:
        """Report that ``words`` words more are done, and which fraction of the pass (0 to 1) by now."""
        self._fraction = fraction
        self._words += words
        if self._bar is not None:
            self._bar.set_postfix_str(self._pace(), refresh=False)
            self._bar.update(int(fraction * _STEPS) - self._bar.n)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._title}: {100 * fraction:.0f} %, {self._pace()}, {self._time_left()} left", file=sys.stderr)

    def _pace(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self._words:,} words, {self._words / seconds:,.0f} words/s"

    def _time_left(self) -> str:
        seconds = time.monotonic() - self._start
        return tqdm.format_interval(seconds / max(self._fraction, 1e-9) * (1 - self._fraction))
