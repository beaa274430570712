"""What all ``alma-*`` commands share: parser, exit status, printed lines, progress, and child processes.

On a terminal, the progress is one live line; otherwise, a line every 15 s. Child processes do not use the terminal.
"""

import argparse
import contextlib
import ctypes
import errno
import functools
import io
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import FrameType
from typing import Any, Callable, NoReturn, Optional, Sequence, TextIO

from fairseq_alma.errors import causes, in_one_line, printable
from fairseq_alma.options import Options

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.1, 15.0
ERASE = "\r\x1b[2K"
Main = Callable[[Optional[Sequence[str]]], Optional[int]]


class _Terminated(SystemExit):
    """Exception that the handler of SIGTERM raises."""


def command(main: Main) -> Main:
    """Wrap a ``main(argv)`` so that a system error or a signal ends the command with a one-line message.

    Args:
        main: function that parses ``argv`` (default: the command line), runs the command and returns an exit status,
            or None for 0.

    Returns:
        The wrapped function. It raises `AlmaError` (status 1) on system errors such as a full disk or a missing
        permission. After cleanup, it returns 130 on Ctrl-C and 143 on SIGTERM. It returns 0 without a message if the
        reader of standard output has exited (``| head``).
    """

    def terminate(number: int, frame: Optional[FrameType]) -> None:
        raise _Terminated(128 + number)

    @functools.wraps(main)
    def wrapped(argv: Optional[Sequence[str]] = None) -> int:
        while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # replaces closed standard streams of this process
            pass
        os.close(null)
        _quiet_libraries()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # The terminal may not show each character.
        handles_sigterm = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if handles_sigterm:
            signal.signal(signal.SIGTERM, terminate)
        try:
            with in_one_line():
                status = main(argv) or 0
                print(end="", flush=True)  # Flush here, because an error at interpreter exit would print a traceback.
                return status
        except (Exception, KeyboardInterrupt, _Terminated) as error:
            for each in causes(error):  # If a signal interrupts saving, torch raises another error.
                if isinstance(each, (KeyboardInterrupt, _Terminated)):
                    is_sigint = isinstance(each, KeyboardInterrupt)
                    what, number = ("interrupted", signal.SIGINT) if is_sigint else ("ended by SIGTERM", signal.SIGTERM)
                    print_line(f"{what}; run the same command again to resume", sys.stderr)
                    return 128 + number
                if isinstance(each, BrokenPipeError) and _is_stdout_closed():
                    return 0
            raise
        finally:
            if handles_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                print(end="", flush=True)
            except OSError:
                discard(sys.stdout)

    return wrapped


def _quiet_libraries() -> None:
    # Unless the root logger has a handler, the import of fairseq configures logging, and hydra then logs debug lines.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    # This call has no effect if the root logger has a handler.
    logging.basicConfig(format="%(name)s: %(message)s", handlers=[handler])
    warnings.filterwarnings("ignore", "'pin_memory' argument")  # fairseq sets it on machines without a GPU, too


def _is_stdout_closed() -> bool:
    # A BrokenPipeError may come from another pipe than that of standard output.
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class Parser(argparse.ArgumentParser):
    """Command-line parser. A usage error exits with status 2 and prints no control characters.

    Args:
        declaring: dataclasses that declare the arguments.
        how: keyword arguments of ``ArgumentParser``.
    """

    def __init__(self, *declaring: type[Options], **how: Any) -> None:
        # Most options fit in one line of 120 columns.
        usual = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=120)
        super().__init__(**{"formatter_class": usual, "allow_abbrev": False, **how})
        for each in declaring:
            each.add_to(self)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments") and "[-- " in (self.usage or ""):
            message += "; see --help, and give options of fairseq-train after --"
        super().error(printable(message[:2000]))  # A message repeats words of the command line, which may be long.


def split_words(argv: Optional[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after ``--``; if ``argv`` is None, of the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


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
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


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
        libc.prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
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
        deadline = time.monotonic() + 10
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)


def last_line(text: str) -> str:
    """Return the last non-blank line of a text, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
