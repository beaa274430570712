"""Print the output and progress of a command: one live progress line on a terminal, a line every 15 s elsewhere."""

import contextlib
import errno
import os
import shutil
import sys
import time
from typing import Optional, TextIO

from fairseq_alma.errors import printable

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
ERASE = "\r\x1b[2K"


class LiveLine(contextlib.AbstractContextManager["LiveLine"]):
    """Progress line of a command on standard error, erased at the end of the ``with`` block."""

    def __init__(self) -> None:
        self.is_terminal = is_terminal(sys.stderr)
        self.every = TERMINAL_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS
        self.next = time.monotonic() + self.every

    def show(self, text: str) -> None:
        """Print a text if enough seconds have passed since the last text. On a terminal, replace the last text."""
        if (now := time.monotonic()) < self.next:
            return
        self.next = now + self.every
        if self.is_terminal:
            write(sys.stderr, ERASE + printable(text)[: shutil.get_terminal_size().columns - 1])
        else:
            print_line(text, sys.stderr)

    def __exit__(self, *exception: object) -> None:
        if self.is_terminal:
            write(sys.stderr, ERASE)


def is_terminal(stream: Optional[TextIO]) -> bool:
    """Return whether an output stream is a terminal that can erase a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def print_line(line: str, stream: Optional[TextIO]) -> None:
    """Print a line to ``sys.stdout`` or ``sys.stderr``; on a terminal, replace the progress line."""
    write(stream, f"{ERASE if is_terminal(stream) else ''}{printable(line)}\n")


def write(stream: Optional[TextIO], text: str) -> None:
    """Write ``text`` and flush. If the reader has exited (``| head``) or stderr fails, discard this and later texts."""
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
    """Redirect an output stream to /dev/null, so that the flush at interpreter exit does not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def last_line(text: str) -> str:
    """Return the last non-blank line of a text, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def format_duration(seconds: float) -> str:
    """Return a number of seconds as ``h:mm:ss``, such as ``1:02:05``; below one hour, as ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
