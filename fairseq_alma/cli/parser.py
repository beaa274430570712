"""What every command's parser is: argparse's, with messages that a terminal can show whatever was typed."""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from fairseq_alma.errors import printable
from fairseq_alma.number_range import Range

_LONGEST_WORD = 1000  # characters of what was typed that a message repeats


class Parser(argparse.ArgumentParser):
    """As argparse's; a usage error is status 2, and what it repeats of the command line steers no terminal."""

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and a message, and end the program."""
        cut = re.sub(rf"(\S{{100}})\S{{{_LONGEST_WORD},}}", r"\1…", message)
        super().error(printable(cut))


def utf8_path(text: str) -> Path:
    """Return the path that a text is, for what fairseq or a record has to name: neither can name other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} found, a name in UTF-8 is needed") from error
    return Path(text)


class InRange:
    """The type of an option that is a number of a range, for ``add_argument(type=...)``.

    Args:
        bounds: the range.
    """

    def __init__(self, bounds: Range) -> None:
        self.bounds = bounds

    def __call__(self, text: str) -> float:
        """Return the number that a text stands for."""
        try:
            return self.bounds.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} found, {error}") from error
