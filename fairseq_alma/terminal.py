"""Print the lines and the progress of a command, and start child processes that do not use its terminal.

On a terminal, the progress is one live line; otherwise, a line every 15 s.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Optional, Sequence, TextIO

from fairseq_alma.errors import printable

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
ERASE = "\r\x1b[2K"
PATIENCE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


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


def format_duration(seconds: float) -> str:
    """Return a number of seconds as ``h:mm:ss``, such as ``1:02:05``; below one hour, as ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def die_with_parent() -> Optional[Callable[[], None]]:
    """Return a ``preexec_fn`` for a child process that must exit when its parent is killed; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start_process(words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child without stdin in a new session. The child exits if this process is killed, but not on Ctrl-C."""
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": die_with_parent(), **options}
    return subprocess.Popen(words, **own)


def end_processes(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Send SIGTERM to the process groups of running children, then SIGKILL to all; wait up to 10 seconds each time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if number == signal.SIGKILL or child.poll() is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)


def last_line(text: str) -> str:
    """Return the last non-blank line of a text, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
