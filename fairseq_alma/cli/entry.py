"""Parser, exit status and one-line error messages of the ``alma-*`` commands."""

import argparse
import functools
import io
import logging
import select
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Callable, NoReturn, Optional, Sequence

from fairseq_alma.errors import causes, in_one_line, printable
from fairseq_alma.options import Options
from fairseq_alma.terminal import discard, print_line

Main = Callable[[Optional[Sequence[str]]], Optional[int]]
_LONGEST_MESSAGE = 2000  # characters; a message repeats words of the command line, which may be long


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
    def wrapped(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        _quiet_libraries()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # The terminal may not show each character.
        on_main_thread = threading.current_thread() is threading.main_thread()
        handles_sigterm = on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if handles_sigterm:
            signal.signal(signal.SIGTERM, terminate)
        try:
            with in_one_line():
                status = main(argv)
                print(end="", flush=True)  # Flush here, because an error at interpreter exit would print a traceback.
                return status
        except (Exception, KeyboardInterrupt, _Terminated) as error:
            for each in causes(error):  # If a signal interrupts saving, torch raises another error.
                if isinstance(each, (KeyboardInterrupt, _Terminated)):
                    is_sigint = isinstance(each, KeyboardInterrupt)
                    what = "interrupted" if is_sigint else "ended by SIGTERM"
                    print_line(f"{what}; no partial file remains; run the same command again to resume", sys.stderr)
                    return 128 + (signal.SIGINT if is_sigint else signal.SIGTERM)
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
    """Log only warnings and errors of libraries.

    Unless the root logger has a handler, the import of fairseq configures logging, and hydra then logs debug lines.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
    warnings.filterwarnings("ignore", "'pin_memory' argument")  # fairseq sets it on machines without a GPU, too


def _is_stdout_closed() -> bool:
    """Return whether the reader of standard output has exited; a BrokenPipeError may come from another pipe."""
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
        """Print the usage and the message, and exit with status 2."""
        if message.startswith("unrecognized arguments") and "[-- " in (self.usage or ""):
            message += "; see --help, and give options of fairseq-train after --"
        super().error(printable(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"))
