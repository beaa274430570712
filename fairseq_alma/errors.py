"""The one exception that tells a user what to correct.

It stands here because every layer raises it: data files, the fairseq plugins and the commands.
"""

import unicodedata


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
