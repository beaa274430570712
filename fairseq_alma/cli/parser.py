"""What every command's parser is: argparse's, with messages that a terminal can show whatever was typed."""

import argparse
import re
from typing import NoReturn

from fairseq_alma.errors import printable

_LONGEST_WORD = 1000  # characters of what was typed that a message repeats


class Parser(argparse.ArgumentParser):
    """As argparse's; a usage error is status 2, and what it repeats of the command line steers no terminal."""

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and a message, and end the program."""
        cut = re.sub(rf"(\S{{100}})\S{{{_LONGEST_WORD},}}", r"\1…", message)
        super().error(printable(cut))
