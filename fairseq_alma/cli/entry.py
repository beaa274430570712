"""What every command does around its own job: turn faults of the outside world into one line and an exit status."""

import contextlib
import errno
import functools
import io
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
from fairseq_alma.errors import AlmaError, causes, is_out_of_memory
from fairseq_alma.terminal import discard, tell

Main = Callable[[Optional[Sequence[str]]], Optional[int]]


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
            tell(
                f"{signalled.number.name}: ended; nothing half-written is left, and the same command resumes or "
                "begins again",
                sys.stderr,
            )
            return 128 + signalled.number
        except BrokenPipeError as error:
            if reader_has_gone():
                return 0
            raise AlmaError(describe_os_error(error)) from error
        except Exception as error:
            if any(isinstance(each, KeyboardInterrupt) for each in causes(error)):
                return tell_of_interruption()
            message = describe_fault(error)
            if message is None:
                raise
            raise AlmaError(message) from error
        finally:
            discard_unwritable_output()

    return wrapped


def tell_of_interruption() -> int:
    """Say that the command was interrupted, and return the exit status."""
    tell("interrupted; nothing half-written is left, and the same command goes on or begins again", sys.stderr)
    return 128 + signal.SIGINT


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


def describe_fault(error: Exception) -> Optional[str]:
    """Say in one line what of the outside world a command met: files, memory, names; None: it is a defect of ours."""
    if is_out_of_memory(error):
        wanted = str(error).strip().partition("\n")[0]
        return (
            f"out of memory{': ' if wanted else ''}{wanted}; give smaller sizes or fewer processes, or use a machine "
            "that has more"
        )
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, UnicodeEncodeError) and isinstance(error.object, str):
        shown = error.object[: error.start][-100:] + error.object[error.start : error.end][:100]
        return f"{shown}: not UTF-8, and what is written here must be; rename it"
    return None


def describe_os_error(error: OSError) -> str:
    """Say in one line which file failed, why, and what to do."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = error.filename if error.filename is not None else "writing" if is_full else "reading or writing"
    if is_full:
        return f"{where}: the disk is full; free some space or choose another folder, then give the same command again"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename is not None:
        return describe_missing_right(Path(os.fsdecode(error.filename)))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}: permission denied; choose a folder that you may write to"
    return f"{where}: {error.strerror or error}; check the path and give the command again"


def describe_missing_right(path: Path) -> str:
    """Say which right is missing where the system said only that one is.

    Args:
        path: what could not be read, entered or written.
    """
    for folder in reversed(path.absolute().parents):
        if not _may(folder, os.X_OK):
            return f"{path}: permission denied, {folder} may not be entered; make it so (chmod), or give another path"
    if path.exists() and not _may(path, os.R_OK):
        return f"{path}: permission denied; make it readable (chmod), or give what you may read"
    if path.is_dir() and not _may(path, os.X_OK):
        return f"{path}: permission denied, it may not be entered; make it so (chmod), or give another path"
    return f"{path}: permission denied; choose a folder that you may write to"


def _may(path: Path, right: int) -> bool:
    """Tell whether the command has a right to what is at a path; where nothing is, it is no right that is missing."""
    try:
        return not path.exists() or os.access(path, right, effective_ids=True)
    except OSError:  # the folder that holds it may not be entered, which is told of that
        return True


def refuse_no_file(path: Path, flag: str, advice: str) -> None:
    """Raise AlmaError, before any work, if what a command is to read is there but no file that it may read.

    Args:
        path: what should be a file. One that is missing passes: whoever reads it says more of what is needed.
        flag: that names it.
        advice: what to do.
    """
    if path.exists() and not path.is_file():
        raise AlmaError(f"{flag} {path}: {'a folder' if path.is_dir() else 'a pipe or a device'}, no file; {advice}")
    if not _may(path, os.R_OK):
        raise AlmaError(f"{flag} {path}: permission denied; make it readable (chmod), or {advice}")


def refuse_no_folder(out: Path, flag: str) -> None:
    """Raise AlmaError, before any work, if a command cannot write into a folder or make it."""
    if out.exists() and not out.is_dir():
        raise AlmaError(f"{flag} {out}: a file; give the name of a folder")
    refuse_unwritable(out, flag)


def refuse_unwritable(out: Path, flag: str) -> None:
    """Raise AlmaError if nothing can be written at a path because of the folders on the way to it.

    Args:
        out: a file or folder that is there or will be.
        flag: that names it.
    """
    folder = out if out.is_dir() else out.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise AlmaError(f"{flag} {out}: {folder} is no folder; give another path")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise AlmaError(f"{flag} {out}: {folder} may not be written to; choose a folder that you may write to")


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
    refuse_unwritable(out, "--out")
