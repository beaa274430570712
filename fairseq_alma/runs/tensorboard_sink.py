"""Points of a run for TensorBoard."""

import shutil
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.arrival_points import Point
from fairseq_alma.runs.live_log import TENSORBOARD, LiveLog
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.tensorboard_files import EVENTS, can_write_events, open_events


class TensorBoardSink:
    """Writes a run's points into event files: one in each launch, which begins with all that is known.

    A TensorBoard that is open reads on where it was, so a file only ever grows.

    Args:
        run: the run.
        live: says where to.
    """

    def __init__(self, run: RunFolder, live: LiveLog) -> None:
        self.run = run
        self.live = live
        self.file: Optional[Path] = None
        self.shown: list[Point] = []

    def require(self) -> None:
        """See `arrival_log.Sink`."""
        if not can_write_events():
            raise AlmaError(
                f"{TENSORBOARD} {self.live.tensorboard}: TensorBoard is not installed; pip install tensorboard, or "
                "leave the option out"
            )
        try:
            self.live.claim_folder(self.run)
        except OSError as error:
            raise AlmaError(f"{TENSORBOARD} {self.live.tensorboard}: {error}; give a folder to write to") from error

    def write(self, points: Sequence[Point]) -> None:
        """See `arrival_log.Sink`."""
        num_same = _num_same(self.shown, points)
        if self.file is not None and num_same == len(points):
            return
        temporary = self.run.root / ".arrivals"
        shutil.rmtree(temporary, ignore_errors=True)
        first_step = points[num_same].arrival if self.file is not None else 0
        self._write_events(temporary, points[num_same:], first_step)
        (new,) = temporary.glob(EVENTS)
        if self.file is None:
            self.file = self._add_file(new)
        else:
            with open(self.file, "ab") as file:
                file.write(new.read_bytes())
        shutil.rmtree(temporary)
        self.shown = list(points)

    def _add_file(self, new: Path) -> Path:
        """Put an event file beside that of the launch before, which a TensorBoard that is open still reads."""
        folder = self.live.folder(self.run) / "arrivals"
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(EVENTS))[:-1]:
            old.unlink()
        shutil.move(new, folder / new.name)
        return folder / new.name

    def _write_events(self, folder: Path, points: Sequence[Point], first_step: int) -> None:
        writer = open_events(folder, first_step)
        if self.file is None:
            record = (self.run.root / RUN_RECORD).read_text(encoding="utf-8")
            # Indented by four, Markdown shows it as it is.
            writer.add_text("run", "\n".join(f"    {line}" for line in record.splitlines()), 0)
        for point in points:
            for name, value in point.figures.items():
                writer.add_scalar(name, value, point.arrival, walltime=point.seconds)
        writer.close()


def _num_same(before: Sequence[Point], now: Sequence[Point]) -> int:
    """Return how many points at the begin are the same."""
    num_same = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        num_same += 1
    return num_same
