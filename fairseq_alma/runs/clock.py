"""Wall time of a stage over all launches, in a file next to it."""

import contextlib
import time
from pathlib import Path

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.runs.records import ClockRecord


class StageClock:
    """Counts the seconds of all launches, lost work included, the pauses between them not.

    A launch that was killed left no note of its end; the last change of a file in its folder stands for it. What this
    launch takes is no difference of times of day, which a clock that is set changes.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.spent = path, 0.0
        if path.is_file():
            before = read_clock(path)
            self.spent = float(before.spent)
            if before.started is not None:
                files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".lock")]
                ended = max((each.stat().st_mtime for each in files), default=0.0)
                self.spent += max(0.0, ended - before.started)
        self.began = time.monotonic()
        self._write(self.spent, time.time())

    def seconds(self) -> float:
        """Return the seconds up to now."""
        return self.spent + time.monotonic() - self.began

    def stop(self) -> None:
        """Note that this launch has ended."""
        self._write(self.seconds(), None)

    def _write(self, spent: float, started: float | None) -> None:
        # A stage of images may take a tenth of a second, which an fsync would double.
        write_json_atomically(self.path, {"spent": spent, "started": started}, durable=False)


def read_clock(path: Path) -> ClockRecord:
    """Read a clock's file; a damaged one counts as not started, as only wall time is lost with it."""
    with contextlib.suppress(AlmaError):
        return as_record(read_json_object(path, ""), ClockRecord, path, "")
    return ClockRecord(spent=0.0, started=None)
