"""What every command does around its own job: turn faults of the outside world into one line and an exit status."""

import contextlib
import errno
import functools
import logging
import os
import select
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Callable, Iterator, Optional, Sequence

from fairseq_alma.atomic_file import refuse_irregular
from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import discard

Main = Callable[[Optional[Sequence[str]]], Optional[int]]


def command(main: Main) -> Main:
    """Wrap a ``main(argv)`` so that a full disk, a missing right or an interruption ends it in one clear line.

    Args:
        main: parses ``argv`` (default: the command line) and does the job; returns an exit status, or None for 0.

    Returns:
        The same function; `AlmaError` passes through (one line, status 1), an ``OSError`` becomes one,
        Ctrl-C gives status 130, SIGTERM 143 and SIGHUP 129, all after tidying up, and a reader that closed the pipe
        (``| head``) ends the command silently. Libraries are kept quiet, see `quiet_libraries`.
    """

    @functools.wraps(main)
    def wrapped(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        open_closed_streams()
        quiet_libraries()
        try:
            with _signals_raise():
                status = main(argv)
            sys.stdout.flush()  # here, as a fault that shows only when the interpreter ends is a traceback
            return status
        except KeyboardInterrupt:
            print(
                "interrupted; nothing half-written is left, and the same command goes on or begins again",
                file=sys.stderr,
            )
            return 128 + signal.SIGINT
        except _Signalled as signalled:
            with contextlib.suppress(OSError):  # of a terminal that was closed
                print(
                    f"{signalled.number.name}: ended; nothing half-written is left, and the same command resumes or "
                    "begins again",
                    file=sys.stderr,
                )
            return 128 + signalled.number
        except BrokenPipeError as error:
            if reader_has_gone():
                discard_unwritable_output()
                return 0
            raise AlmaError(describe_os_error(error)) from error
        except OSError as error:
            discard_unwritable_output()
            raise AlmaError(describe_os_error(error)) from error

    return wrapped


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
    """Drop what standard output holds but cannot write, as the interpreter would stumble over it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


def describe_os_error(error: OSError) -> str:
    """Say in one line which file failed, why, and what to do."""
    where = error.filename if error.filename is not None else "writing"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: the disk is full; free some space or choose another folder, then give the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}: permission denied; choose a folder that you may write to"
    return f"{where}: {error.strerror or error}; check the path and give the command again"


def refuse_existing(out: Path, force: bool) -> None:
    """Raise AlmaError if the file that ``--out`` names may not be written.

    Args:
        out: the file.
        force: whether ``--force`` allows to replace it.
    """
    if out.is_dir():
        raise AlmaError(f"--out {out}: a folder; give the name of a file in it")
    refuse_irregular(out, "--out ")
    if out.exists() and not force:
        raise AlmaError(f"--out {out}: exists already; give another name, or --force to replace it")
