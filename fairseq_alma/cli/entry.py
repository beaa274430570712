"""The frame of every command: faults of the outside world become one line and an exit status."""

import argparse
import contextlib
import functools
import logging
import select
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Callable, Iterator, NoReturn, Optional, Sequence

from fairseq_alma.errors import causes, in_one_line, printable
from fairseq_alma.options import Options
from fairseq_alma.terminal import discard, print_line

Main = Callable[[Optional[Sequence[str]]], Optional[int]]
_LONGEST_MESSAGE = 2000  # characters, of which what was typed may be most


class _Terminated(SystemExit):
    """SIGTERM arrived."""


def command(main: Main) -> Main:
    """Wrap a ``main(argv)`` so that a fault of the outside world or an interruption ends it in one clear line.

    Args:
        main: parses ``argv`` (default: the command line) and does the job; returns an exit status, or None for 0.

    Returns:
        The same function. A full disk, a missing permission and the like become `AlmaError` (status 1). Ctrl-C gives
        status 130 and SIGTERM 143, after tidying up; a closed pipe (``| head``) ends the command silently.
    """

    @functools.wraps(main)
    def wrapped(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        quiet_libraries()
        try:
            with in_one_line(), _sigterm_raises():
                status = main(argv)
                print(end="", flush=True)  # here, as a fault that shows only when the interpreter ends is a traceback
                return status
        except (Exception, KeyboardInterrupt, _Terminated) as error:
            for each in causes(error):  # a library may have made another error of it: torch, where it saves a file
                if isinstance(each, (KeyboardInterrupt, _Terminated)):
                    return _ended(signal.SIGTERM if isinstance(each, _Terminated) else signal.SIGINT)
                if isinstance(each, BrokenPipeError) and _reader_has_gone():
                    return 0
            raise
        finally:
            try:
                print(end="", flush=True)
            except OSError:
                discard(sys.stdout)

    return wrapped


def _ended(number: signal.Signals) -> int:
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    print_line(f"{what}; nothing half-written is left, and the same command resumes or starts over", sys.stderr)
    return 128 + number


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the block with an exception, unless it is ignored or handled already."""
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(number: int, frame: Optional[FrameType]) -> None:
    raise _Terminated(128 + number)


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


def _reader_has_gone() -> bool:
    """Return whether nobody reads standard output any more; a pipe to a worker process can break as well."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class Parser(argparse.ArgumentParser):
    """As argparse's; a usage error is status 2, and what it repeats of the command line steers no terminal."""

    @classmethod
    def of(cls, prog: str, description: str, epilog: Optional[str], *declaring: type[Options], **how: Any) -> "Parser":
        """Return the parser of a command whose operands and options some dataclasses declare.

        Args:
            prog: the command's name.
            description: what it does.
            epilog: examples, shown unchanged; such a command has no abbreviated options. None: argparse's own ways.
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
        super().error(printable(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"))
