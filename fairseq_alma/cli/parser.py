"""What every command's parser is: argparse's, with messages that a terminal can show whatever was typed."""

import argparse
import os
import re
from pathlib import Path
from typing import Mapping, NoReturn

from fairseq_alma.errors import printable
from fairseq_alma.number_range import Range

_LONGEST_WORD = 1000  # characters of what was typed that a message repeats


class Parser(argparse.ArgumentParser):
    """As argparse's; a usage error is status 2, and what it repeats of the command line steers no terminal."""

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and a message, and end the program."""
        cut = re.sub(rf"(\S{{100}})\S{{{_LONGEST_WORD},}}", r"\1…", message)
        super().error(printable(cut))


def check_ranges(parser: argparse.ArgumentParser, arguments: argparse.Namespace, ranges: Mapping[str, Range]) -> None:
    """End the program with a usage error if an option that is a number is out of its range; None is in every range.

    Args:
        parser: for errors.
        arguments: what it has read.
        ranges: name of an option with underscores -> its range.
    """
    for name, bounds in ranges.items():
        value = getattr(arguments, name)
        try:
            if value is not None:
                bounds.check(value)
        except ValueError as error:
            parser.error(f"--{name.replace('_', '-')} {value}: {error}")


def utf8_path(text: str) -> Path:
    """Return the path that a text is, for what fairseq or a record has to name: neither can name other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        needed = "a name in UTF-8 is needed"
        if _is_utf8(os.fsencode(text)):
            needed = "which a locale of ASCII cannot name; set LC_ALL=C.UTF-8"
        raise argparse.ArgumentTypeError(f"{text!r} found, {needed}") from error
    return Path(text)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
