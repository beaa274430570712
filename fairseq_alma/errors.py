"""The one exception that tells a user what to correct, and the file's name for faults of the disk.

They stand here because every layer raises them: data files, the fairseq plugins and the commands.
"""

import unicodedata
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` that names no file: Python names it when opening fails, but not when writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
