"""Show how far a pass over the input is."""

import sys
import time
from typing import Optional

from fairseq_alma.terminal import LiveLine, spell_duration, tell


class PassProgress:
    """Words per second and time left of one pass.

    Args:
        title: what the pass does.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()
        self._words = 0
        self._line = LiveLine()
        self._line.is_due()  # nothing is known yet

    def __enter__(self) -> "PassProgress":
        return self

    def __exit__(self, kind: Optional[type], *exception: object) -> None:
        self._line.clear()
        if kind is None:
            tell(f"{self._title}: {self._pace()}, {self._seconds():.1f} s", sys.stderr)

    def update(self, fraction: float, words: int) -> None:
        """Report that ``words`` words more are done, and which fraction of the pass (0 to 1) by now."""
        self._words += words
        if self._line.is_due():
            left = spell_duration(self._seconds() / max(fraction, 1e-9) * (1 - fraction))
            done = f"{self._title}: {100 * fraction:.0f} %"
            shorter = f"{done}, {left} left"
            self._line.show(f"{done}, {self._pace()}, {left} left", fraction, 1.0, [shorter])

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _pace(self) -> str:
        return f"{self._words:,} words, {self._words / self._seconds():,.0f} words/s"
