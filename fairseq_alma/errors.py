"""The one exception that tells a user what to correct, and the file's name for faults of the disk.

They stand here because every layer raises them: data files, the fairseq plugins and the commands.
"""

import errno
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional


def printable(text: str) -> str:
    r"""Spell out what would steer a terminal: ``\x1b`` for an escape, as file names and tampered files may hold any."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in text
    )


_NO_MEMORY = ("can't allocate memory", "not enough memory", "failed to map segment", "can't start new thread")


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
        or (isinstance(each, (RuntimeError, ImportError)) and any(words in str(each) for words in _NO_MEMORY))
        for each in causes(error)
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` that names no file: Python names it when opening fails, but not when writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
