"""What a command says while it works: on a terminal one live line, elsewhere a line now and then.

rich draws the live line: its bar, colors (``NO_COLOR``) and width are rich's. rich's own ``Live`` and ``Progress`` are
not used: they hide the cursor, which a killed run would leave hidden, and end the process where nobody reads any more.
rich is imported with the first live line: 50 ms that a log need not pay.
"""

import errno
import math
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING, Iterable, Iterator, Optional, Sequence, TextIO, TypeVar

from fairseq_alma.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

TERMINAL_EVERY_SECONDS = 0.1
LOG_EVERY_SECONDS = 15.0
BAR_COLUMNS = (8, 40)  # at least and at most, where there is a bar
ERASE = "\r\x1b[2K"

T = TypeVar("T")


class LiveLine:
    """One line on standard error that tells how far a command is.

    Args:
        every: seconds between two times; None: what suits a terminal or a log.
    """

    def __init__(self, every: Optional[float] = None) -> None:
        self.is_terminal = is_terminal(sys.stderr)
        usual = TERMINAL_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS
        self.every = usual if every is None else every
        self.next = -math.inf
        self.console: Optional[Console] = None

    def is_due(self) -> bool:
        """Tell whether something may be shown now; if so, it counts as shown."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + self.every
        return True

    def show(self, text: str, done: float = 0, total: Optional[float] = None, shorter: Sequence[str] = ()) -> None:
        """Show a text, on a terminal with a bar beside it if there is a total.

        Args:
            text: all of it.
            done: how far the work is, for the bar.
            total: where it ends; None: no bar.
            shorter: the same in fewer words each, for a terminal that is too narrow.
        """
        if self.is_terminal:
            write(sys.stderr, ERASE + self._draw([printable(each) for each in (text, *shorter)], done, total))
        else:
            tell(text, sys.stderr)

    def clear(self) -> None:
        """Leave the terminal's line to somebody else."""
        if self.console is not None:
            write(sys.stderr, ERASE)

    def _draw(self, texts: Sequence[str], done: float, total: Optional[float]) -> str:
        """Return the first text that fits the terminal as it is now, or what fits of the last, with the bar."""
        from rich.console import Console, Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if self.console is None:
            self.console = Console(file=sys.stderr, force_terminal=True)
        least, most = BAR_COLUMNS
        # A full line would be broken into two where the terminal is made narrower.
        columns = self.console.width - 1
        room = columns if total is None else columns - least
        text = next((each for each in texts if len(each) <= room), texts[-1][:columns])
        parts: list[Text | ProgressBar] = [Text(text, end="")]
        if total is not None and len(text) <= room:
            bar = ProgressBar(total, done, width=min(most, columns - len(text) - 1))
            parts = [Text(f"{text} ", end=""), bar]
        with self.console.capture() as drawn:
            self.console.print(Group(*parts), end="")
        return drawn.get()


def track(items: Iterable[T], total: int, title: str, unit: str) -> Iterator[T]:
    """Yield each item, and show how many are done: ``title: 3/10 batches``."""
    line = LiveLine()
    try:
        for number, item in enumerate(items):
            if line.is_due():
                line.show(f"{title}: {number:,}/{total:,} {unit}", number, total)
            yield item
    finally:
        line.clear()


def is_terminal(stream: Optional[TextIO]) -> bool:
    """Tell whether a line can be written over there."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def tell(line: str, stream: Optional[TextIO]) -> None:
    """Print a line, on a terminal in place of the live line.

    Args:
        line: for people.
        stream: ``sys.stdout`` or ``sys.stderr``; None: it was closed before the command began.
    """
    write(stream, f"{ERASE if is_terminal(stream) else ''}{printable(line)}\n")


def write(stream: Optional[TextIO], text: str) -> None:
    """Write at once; where nobody reads any more (``| head``, a terminal that is closed), work continues unseen.

    So it does where standard error cannot be written for another reason: no result is lost.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) and stream is not sys.stderr:
            raise
        discard(stream)


def shell_words(words: Iterable[str]) -> str:
    """Spell words for any POSIX shell as ``shlex.join`` does, but what is no text as ``printf`` reads it.

    So it steers no terminal: ``"$(printf '\\033')"``. Line feeds at a word's end stand as they are: a shell drops them
    there.
    """
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    body = word.rstrip("\n")
    octal = "".join(
        char if char.isprintable() and char not in "\\'%" else "".join(f"\\{byte:03o}" for byte in os.fsencode(char))
        for char in body
    )
    ends = word[len(body) :]
    return f"\"$(printf '{octal}')\"" + (f"'{ends}'" if ends else "")


def discard(stream: TextIO) -> None:
    """Drop what a stream holds but cannot write: the interpreter would stumble over it again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def last_line(text: str) -> str:
    """Return the last line of what a command said that is not blank; empty if it said nothing."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def spell_duration(seconds: float) -> str:
    """Spell a duration: ``1:02:05`` for an hour, two minutes and five seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
