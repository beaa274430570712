"""One-line error messages for users: `AlmaError`, checks of paths, system errors."""

import contextlib
import errno
import os
import traceback
import unicodedata
from pathlib import Path
from typing import Iterator, Optional, Union

# files and folders with user code, such as learners; messages about errors in this code contain file and line
USER_CODE: list[str] = []
_NO_MEMORY = ("allocate memory", "not enough memory", "failed to map segment", "can't start new thread")


def printable(text: str) -> str:
    """Return a text with escaped control characters, for messages that contain file names."""
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in text
    )


class AlmaError(SystemExit, ValueError):
    """Error that the user can correct. The message is one line: file or flag, expected and found values, next step.

    The class derives from ``ValueError`` for callers in Python, and from ``SystemExit`` so that the interpreter prints
    an uncaught error in one line and exits with status 1, also in the commands of fairseq.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


class ProcessError(AlmaError):
    """Error of a process, for example too little memory. The files that the process reads may be undamaged."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set ``path`` as the file name of an ``OSError`` that the block raises without a file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def refusing_damage(fault: str, remedy: str) -> Iterator[None]:
    """Convert any error of a library that reads a damaged file to AlmaError. System errors are raised unchanged.

    Args:
        fault: file and fault, for the message; the error of the library follows in parentheses.
        remedy: next step, for the message.
    """
    try:
        yield
    except Exception as error:  # A damaged file can raise an error of any type.
        is_system_error = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, (AlmaError, MemoryError)) or is_system_error:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise AlmaError(f"{fault} ({reason}); {remedy}") from error


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Convert an exception of the block to AlmaError if `describe_fault` returns a message for the exception."""
    try:
        yield
    except Exception as error:
        message = describe_fault(error)
        if message is None:
            raise
        raise AlmaError(message) from error


def causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """Yield an exception, then each exception that caused it or that Python was handling when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def describe_fault(error: BaseException) -> Optional[str]:
    """Return a one-line description of a system error or an error in user code; None for any other error (a defect)."""
    if isinstance(error, MemoryError) or any(
        type(each).__name__ == "OutOfMemoryError" or any(words in str(each) for words in _NO_MEMORY)
        for each in causes(error)
    ):
        reason = str(error).strip().partition("\n")[0]
        return f"out of memory ({reason}); use a smaller batch, a smaller model or fewer processes"
    if isinstance(error, OSError):
        # filename2: target of a renaming, which may be a file, or a folder that cannot be emptied
        where = error.filename2 or ("standard output, or a file" if error.filename is None else error.filename)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{where}: the disk is full; free some space or choose another folder, then repeat the command"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{where}: permission denied; change the permissions (chmod), or give another path"
        return f"{where}: {error.strerror or error}; check the path and repeat the command"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    for file, line in reversed(frames):
        if any(file == code or file.startswith(f"{code}{os.sep}") for code in USER_CODE):
            return f"{file}, line {line}: {type(error).__name__}: {error}; correct the code and repeat the command"
    return None


def refuse_no_file(path: Path, flag: str, advice: str) -> None:
    """Raise AlmaError if an input is not a readable file.

    Args:
        path: path of the input.
        flag: option or positional argument, for the message.
        advice: next step, for the message.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "a pipe or a device" if path.exists() else "nothing"
        raise AlmaError(f"{flag} {path}: expected a file, found {found}; {advice}")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise AlmaError(f"{flag} {path}: permission denied; make the file readable (chmod), or {advice}")


def refuse_no_folder(out: Path, flag: str) -> None:
    """Raise AlmaError if an output folder cannot be created or written to."""
    if out.exists() and not out.is_dir():
        raise AlmaError(f"{flag} {out}: expected a folder, found a file; give another path")
    refuse_unwritable(out, flag)


def refuse_unwritable(out: Path, flag: str) -> None:
    """Raise AlmaError if a folder is not writable: ``out`` if it is a folder, else its nearest existing parent."""
    folder = out if out.is_dir() else next(each for each in out.absolute().parents if each.exists())
    if not folder.is_dir():
        raise AlmaError(f"{flag} {out}: expected a folder at {folder}, found a file; give another path")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise AlmaError(f"{flag} {out}: no permission to write to {folder}; choose another folder")


def refuse_colon(path: Union[str, Path], flag: str = "") -> None:
    """Raise AlmaError if the path of a stream of text contains a colon, where fairseq splits paths.

    Args:
        path: path of the stream.
        flag: option followed by a space, for the message; empty if no option sets the path.
    """
    if os.pathsep in str(path):
        raise AlmaError(f"{flag}{path}: fairseq splits paths at {os.pathsep!r}; rename the folder")


def refuse_irregular(path: Path, flag: str = "") -> None:
    """Raise AlmaError if an output path is a folder, a symbolic link or a special file (such as a device).

    Args:
        path: path of the output.
        flag: option followed by a space, for the message; empty if no option sets the path.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        found = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "a special file"
        raise AlmaError(f"{flag}{path}: expected a regular file or a new path, found {found}; give another name")
