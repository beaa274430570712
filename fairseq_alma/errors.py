"""What tells a user what to correct, in one line each: files, folders, rights, memory, names.

Said before the work where it can be seen before (``refuse_...``), and of any exception afterwards (``describe_...``).
All stands here because every layer raises it: data files, the fairseq plugins and the commands.
"""

import contextlib
import errno
import os
import stat
import traceback
import unicodedata
from pathlib import Path
from typing import Iterator, Optional

GIVEN_CODE: list[str] = []
"""Files and folders of the user's own code, such as learners; a fault in them names the line."""
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "failed to map segment",
    "can't start new thread",
    "Storage size calculation overflowed",
    "error return without exception set",  # a library in C, whose import did not ask whether it got its memory
)


def printable(text: str) -> str:
    r"""Spell out what would steer a terminal: ``\x1b`` for an escape, as file names and tampered files may hold any."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in text
    )


class AlmaError(SystemExit, ValueError):
    """Report bad input in one line: the file or flag, what was found, the rule, the next step.

    Python code catches it as the ``ValueError`` that it is. Where nobody catches it, the interpreter treats it as any
    ``SystemExit`` with a text: it prints that one line on standard error and exits with status 1. The stock commands
    of fairseq, whose entry points are not ours, therefore answer bad input without a traceback too.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))

    def __str__(self) -> str:
        return str(self.code)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` that names no file: Python names it when opening fails, but not when writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Raise AlmaError for what `describe_fault` knows: in what fairseq's own commands call; ours have it around all."""
    try:
        yield
    except Exception as error:
        message = describe_fault(error)
        if message is None:
            raise
        raise AlmaError(message) from error


def causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """Yield an error and what is behind it: a library in C that fails while it is imported has an error of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, that of a GPU too: torch, threads and the loader of libraries have other errors."""
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (
            isinstance(each, (RuntimeError, ImportError, SystemError))
            and any(words in str(each) for words in _NO_MEMORY)
        )
        for each in causes(error)
    )


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
    return _describe_given_code(error)


def _describe_given_code(error: Exception) -> Optional[str]:
    """Say in which line of the user's own code a fault is; None: in none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    for file, line in reversed(frames):
        if any(file == given or file.startswith(f"{given}{os.sep}") for given in GIVEN_CODE):
            said = f": {error.msg if isinstance(error, SyntaxError) else error}".rstrip(": ")
            return f"{file}, line {line}: {type(error).__name__}{said}; mend it, and give the same command again"
    return None


def describe_os_error(error: OSError) -> str:
    """Say in one line which file failed, why, and what to do."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = error.filename if error.filename is not None else "writing" if is_full else "reading or writing"
    if is_full:
        return f"{where}: the disk is full; free some space or choose another folder, then give the same command again"
    if error.errno == errno.ELOOP and error.filename is not None and os.path.islink(error.filename):
        return f"{where}: a symbolic link, which is not written through; remove it"
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


def refuse_irregular(path: Path, flag: str = "") -> None:
    """Raise AlmaError unless a file may be written at this path: only a regular file is ever replaced.

    Args:
        path: the file.
        flag: that names it, with a space behind it, for the message.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise AlmaError(
            f"{flag}{path}: {found}, which is not replaced; give the name of a file that is not there yet, or of a "
            "regular file"
        )
