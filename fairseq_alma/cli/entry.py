"""What every command does around its own job: faults of the outside world become one line and an exit status."""

import argparse
import contextlib
import functools
import io
import logging
import os
import re
import select
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Callable, Iterator, NoReturn, Optional, Sequence

from fairseq_alma.errors import AlmaError, causes, describe_fault, describe_os_error, printable
from fairseq_alma.options import Options
from fairseq_alma.terminal import discard, tell

Main = Callable[[Optional[Sequence[str]]], Optional[int]]
_LONGEST_WORD = 1000  # characters of what was typed that a message repeats


def command(main: Main) -> Main:
    """Wrap a ``main(argv)`` so that a fault of the outside world or an interruption ends it in one clear line.

    Args:
        main: parses ``argv`` (default: the command line) and does the job; returns an exit status, or None for 0.

    Returns:
        The same function; `AlmaError` passes through (one line, status 1), and what `describe_fault` knows becomes one:
        a full disk, a missing right, too little memory. Ctrl-C gives status 130, SIGTERM 143 and SIGHUP 129, all after
        tidying up, and a reader that closed the pipe (``| head``) ends the command silently. Standard streams are made
        fit for any text, see `open_closed_streams` and `show_any_text`, and libraries are kept quiet, see
        `quiet_libraries`.
    """

    @functools.wraps(main)
    def wrapped(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        open_closed_streams()
        show_any_text()
        quiet_libraries()
        try:
            with _signals_raise():
                status = main(argv)
            sys.stdout.flush()  # here, as a fault that shows only when the interpreter ends is a traceback
            return status
        except KeyboardInterrupt:
            return tell_of_interruption()
        except _Signalled as signalled:
            return tell_of_signal(signalled.number)
        except BrokenPipeError as error:
            if reader_has_gone():
                return 0
            raise AlmaError(describe_os_error(error)) from error
        except Exception as error:
            for each in causes(error):  # a library may have made another error of it: torch, where it saves a file
                if isinstance(each, KeyboardInterrupt):
                    return tell_of_interruption()
                if isinstance(each, _Signalled):
                    return tell_of_signal(each.number)
            message = describe_fault(error)
            if message is None:
                raise
            raise AlmaError(message) from error
        finally:
            discard_unwritable_output()

    return wrapped


def tell_of_interruption() -> int:
    """Say that the command was interrupted, and return the exit status."""
    tell("interrupted; nothing half-written is left, and the same command resumes or starts over", sys.stderr)
    return 128 + signal.SIGINT


def tell_of_signal(number: signal.Signals) -> int:
    """Say that a signal has ended the command, and return the exit status."""
    said = f"{number.name}: ended; nothing half-written is left, and the same command resumes or starts over"
    tell(said, sys.stderr)
    return 128 + number


class _Signalled(SystemExit):
    """A signal that asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = signal.Signals(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block with an exception; one that is ignored (``nohup``) or handled stays so."""
    caught = []
    if threading.current_thread() is threading.main_thread():
        caught = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    try:
        for each in caught:
            signal.signal(each, _raise_signalled)
        yield
    finally:
        for each in caught:
            signal.signal(each, signal.SIG_DFL)


def _raise_signalled(number: int, frame: Optional[FrameType]) -> None:
    raise _Signalled(number)


def open_closed_streams() -> None:
    """Point standard streams that were closed (``>&-``) at nothing, before another file gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def show_any_text() -> None:
    r"""Let standard streams show what their encoding lacks as ``\u2192``, such as all but ASCII where the locale is C.

    Names of files that are not UTF-8 are shown so in any locale.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def quiet_libraries() -> None:
    """Keep from users what libraries say to their developers; warnings and errors of fairseq are shown as before.

    fairseq sets up logging while it is imported, down to hydra's debug lines, unless somebody has done so before.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")


def reader_has_gone() -> bool:
    """True if nobody reads standard output any more; a pipe to a worker process can break as well."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def discard_unwritable_output() -> None:
    """Drop what standard streams hold but cannot write, as the interpreter would stumble over it again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


class Parser(argparse.ArgumentParser):
    """As argparse's; a usage error is status 2, and what it repeats of the command line steers no terminal."""

    @classmethod
    def of(cls, prog: str, description: str, epilog: Optional[str], *declaring: type[Options], **how: Any) -> "Parser":
        """Return the parser of a command whose operands and options some dataclasses declare.

        Args:
            prog: the command's name.
            description: what it does.
            epilog: examples, shown as they are; such a command has no options cut short. None: argparse's own ways.
            declaring: the dataclasses.
            how: as argparse's.
        """
        if epilog is not None:
            how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **how}
        parser = cls(prog=prog, description=description, epilog=epilog, **how)
        for each in declaring:
            for name, words in each.operands().items():
                parser.add_argument(name, **words)
            each.add_to(parser)
        return parser

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and a message, and end the program."""
        cut = re.sub(rf"(\S{{100}})\S{{{_LONGEST_WORD},}}", r"\1…", message)
        super().error(printable(cut))
