"""The wall time of a stage, over all its launches."""

import contextlib
import time
from pathlib import Path
from typing import Optional

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.runs.records import ClockRecord


class StageClock:
    """Wall time of a stage over all launches, lost work included, the pauses between them not.

    A launch that was killed left no note of its end; the last change of a file in a folder stands for it.

    Args:
        path: the clock's file.
        folder: where the launches write.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.spent = 0.0
        if self.path.is_file():
            before = read_clock(self.path)
            self.spent = float(before.spent)
            if before.started is not None:
                # A lock has been signed by the launch that asks.
                files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".lock")]
                ended = max((each.stat().st_mtime for each in files), default=0.0)
                self.spent += max(0.0, ended - before.started)
        self.started = time.time()
        self._write(self.spent, self.started)

    def seconds(self) -> float:
        """Return the seconds up to now."""
        return self.spent + max(0.0, time.time() - self.started)

    def stop(self) -> None:
        """Note that this launch has ended."""
        self._write(self.seconds(), None)

    def _write(self, spent: float, started: Optional[float]) -> None:
        # A stage of images may take a tenth of a second, which waiting for the disk would double.
        write_json_atomically(self.path, {"spent": spent, "started": started}, durable=False)


def read_clock(path: Path) -> ClockRecord:
    """Read a clock's file; one that is damaged has not run, as nothing but wall time is lost with it."""
    with contextlib.suppress(AlmaError):
        return as_record(read_json_object(path, ""), ClockRecord, path, "")
    return ClockRecord(spent=0.0, started=None)
