"""Errors that a user can correct, in one line each: `AlmaError`, checks before any work, faults of the system."""

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
_NO_MEMORY = ("can't allocate memory", "not enough memory", "failed to map segment", "can't start new thread")


def printable(text: str) -> str:
    r"""Escape what would steer a terminal: ``\x1b`` for an escape, as file names may hold any character."""
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
    """Raise AlmaError for what `describe_fault` knows."""
    try:
        yield
    except Exception as error:
        message = describe_fault(error)
        if message is None:
            raise
        raise AlmaError(message) from error


def causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from: a library may have made another error of an interruption."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def describe_fault(error: BaseException) -> Optional[str]:
    """Describe in one line a fault of the system or of the user's code; None: the error is a defect of this package."""
    if isinstance(error, MemoryError) or any(
        type(each).__name__ == "OutOfMemoryError" or any(words in str(each) for words in _NO_MEMORY)
        for each in causes(error)
    ):
        return f"out of memory ({str(error).strip().partition(chr(10))[0]}); give smaller sizes or fewer processes"
    if isinstance(error, OSError):
        return describe_os_error(error)
    return _describe_given_code(error)


def _describe_given_code(error: BaseException) -> Optional[str]:
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    for file, line in reversed(frames):
        if any(file == given or file.startswith(f"{given}{os.sep}") for given in GIVEN_CODE):
            return f"{file}, line {line}: {type(error).__name__}: {error}; fix it, and give the same command again"
    return None


def describe_os_error(error: OSError) -> str:
    """Describe in one line which file failed, why, and what to do."""
    where = "standard output, or a file" if error.filename is None else error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: the disk is full; free some space or choose another folder, then give the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}: permission denied; change the permissions (chmod), or give another path"
    return f"{where}: {error.strerror or error}; check the path and give the command again"


def refuse_no_file(path: Path, flag: str, advice: str) -> None:
    """Raise AlmaError if what a command is to read is there but no file that it may read.

    Args:
        path: of the file. A missing one passes: its reader reports that.
        flag: that names it.
        advice: what to do.
    """
    if path.exists() and not path.is_file():
        raise AlmaError(f"{flag} {path}: {'a folder' if path.is_dir() else 'a pipe or a device'}, no file; {advice}")
    if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
        raise AlmaError(f"{flag} {path}: permission denied; make it readable (chmod), or {advice}")


def refuse_no_folder(out: Path, flag: str) -> None:
    """Raise AlmaError if a command cannot write into a folder or make it."""
    if out.exists() and not out.is_dir():
        raise AlmaError(f"{flag} {out}: a file; give the name of a folder")
    refuse_unwritable(out, flag)


def refuse_unwritable(out: Path, flag: str) -> None:
    """Raise AlmaError if nothing can be written at a path, there or not, because of the folders on the way to it."""
    folder = out if out.is_dir() else out.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise AlmaError(f"{flag} {out}: {folder} is no folder; give another path")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise AlmaError(f"{flag} {out}: no permission to write to {folder}; choose another folder")


def refuse_irregular(path: Path, flag: str = "") -> None:
    """Raise AlmaError unless a file may be written at this path: only a regular file is replaced.

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
        raise AlmaError(f"{flag}{path}: {found}, which is not replaced; give the name of a new or a regular file")
