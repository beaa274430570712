"""Common code of all commands: parser, exit status, and one-line messages for system errors."""

import argparse
import functools
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
_LONGEST_MESSAGE = 2000  # characters, because a message repeats words of the command line


class _Terminated(SystemExit):
    """Raised when SIGTERM arrives."""


def command(main: Main) -> Main:
    """Wrap a ``main(argv)`` so that a system error or a signal ends the command with a one-line message.

    Args:
        main: function that parses ``argv`` (default: the command line), runs the command and returns an exit status,
            or None for 0.

    Returns:
        The wrapped function. A full disk, a missing permission and similar errors raise `AlmaError` (status 1). Ctrl-C
        returns 130 and SIGTERM 143, after cleanup. A closed pipe (``| head``) ends the command silently.
    """

    def terminate(number: int, frame: Optional[FrameType]) -> None:
        raise _Terminated(128 + number)

    @functools.wraps(main)
    def wrapped(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        _quiet_libraries()
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
            for each in causes(error):  # torch raises an error of another type if a signal interrupts saving a file.
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
    """Hide debug and info logs of libraries; keep warnings and errors of fairseq.

    When imported, fairseq configures logging with hydra's debug lines, unless the root logger has a handler.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")


def _is_stdout_closed() -> bool:
    """Return whether the reader of standard output has exited; a BrokenPipeError can also come from a worker's pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class OneLineHelp(argparse.RawDescriptionHelpFormatter):
    """Format each option in one line of at most 120 columns; long lists of choices follow the help text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if self._has_wide_choices(action):
            return lambda num_values: ("NAME",) * num_values
        return super()._metavar_formatter(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        text, separator, default = (action.help or "").partition(" (default: ")
        choices = f" {{{','.join(map(str, action.choices or ()))}}}" if self._has_wide_choices(action) else ""
        return text + choices + separator + default

    @staticmethod
    def _has_wide_choices(action: argparse.Action) -> bool:
        choices = [] if action.metavar is not None else [*map(str, action.choices or ())]
        return len(" ".join([*action.option_strings[-1:], *choices])) > 26


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors exit with status 2 and print no control characters."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"formatter_class": OneLineHelp, "allow_abbrev": False, **how})

    @classmethod
    def of(cls, prog: str, description: str, epilog: Optional[str], *declaring: type[Options], **how: Any) -> "Parser":
        """Build a parser from the dataclasses that declare its arguments; ``how`` are arguments of ArgumentParser."""
        parser = cls(prog=prog, description=description, epilog=epilog, **how)
        for each in declaring:
            for name, words in each.operands().items():
                parser.add_argument(name, **words)
            each.add_to(parser)
        return parser

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        super().error(printable(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"))
