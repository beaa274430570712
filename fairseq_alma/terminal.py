"""Progress of a command: one live line on a terminal, a line now and then elsewhere."""

import errno
import math
import os
import shutil
import sys
import time
from typing import Iterable, Iterator, Optional, TextIO, TypeVar

from fairseq_alma.errors import printable

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
ERASE = "\r\x1b[2K"

T = TypeVar("T")


class LiveLine:
    """One line on standard error that shows the progress of a command.

    Args:
        every: seconds between two updates; None: what suits a terminal or a log.
    """

    def __init__(self, every: Optional[float] = None) -> None:
        self.is_terminal = is_terminal(sys.stderr)
        usual = TERMINAL_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS
        self.every, self.next = usual if every is None else every, -math.inf

    def is_due(self) -> bool:
        """Return whether something may be shown now; if so, it counts as shown."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + self.every
        return True

    def show(self, text: str) -> None:
        """Show a text, on a terminal in place of the one before and no longer than a line."""
        if self.is_terminal:
            write(sys.stderr, ERASE + printable(text)[: shutil.get_terminal_size().columns - 1])
        else:
            print_line(text, sys.stderr)

    def clear(self) -> None:
        """Erase the line."""
        if self.is_terminal:
            write(sys.stderr, ERASE)


def track(items: Iterable[T], total: int, title: str, unit: str) -> Iterator[T]:
    """Yield each item, and show how many are done: ``title: 3/10 batches``."""
    line = LiveLine()
    try:
        for number, item in enumerate(items):
            if line.is_due():
                line.show(f"{title}: {number:,}/{total:,} {unit}")
            yield item
    finally:
        line.clear()


def is_terminal(stream: Optional[TextIO]) -> bool:
    """Return whether a line can be erased and written again there."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def print_line(line: str, stream: Optional[TextIO]) -> None:
    """Print a line to ``sys.stdout`` or ``sys.stderr``, on a terminal in place of the live line."""
    write(stream, f"{ERASE if is_terminal(stream) else ''}{printable(line)}\n")


def write(stream: Optional[TextIO], text: str) -> None:
    """Write at once; where nobody reads any more (``| head``, a terminal that is closed), work continues unseen.

    So it does where standard error cannot be written for another reason: no result is lost.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) and stream is not sys.stderr:
            raise
        discard(stream)


def discard(stream: TextIO) -> None:
    """Drop what a stream holds but cannot write: the interpreter would stumble over it again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def last_line(text: str) -> str:
    """Return the last line of a command's output that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def format_duration(seconds: float) -> str:
    """Format a duration: ``1:02:05`` for an hour, two minutes and five seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
