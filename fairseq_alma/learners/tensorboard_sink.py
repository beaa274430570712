"""Points of a run for TensorBoard, through the package that fairseq uses itself."""

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.arrival_points import Point
from fairseq_alma.learners.live_log import TENSORBOARD, LiveLog
from fairseq_alma.learners.run_folder import RUN_RECORD, RunFolder

EVENTS = "events.out.tfevents.*"


class TensorBoardSink:
    """Writes a run's points into one event file.

    Args:
        run: the run.
        live: says where to.
    """

    def __init__(self, run: RunFolder, live: LiveLog) -> None:
        self.run = run
        self.live = live

    def require(self) -> None:
        """See `arrival_log.Sink`."""
        if not any(importlib.util.find_spec(package) for package in ("tensorboard", "tensorboardX")):
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
        folder, temporary = self.live.folder(self.run) / "arrivals", self.run.root / ".arrivals"
        folder.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: TensorBoard reads whatever appears in its folder.
        shutil.rmtree(temporary, ignore_errors=True)
        self._write_events(temporary, points)
        for old in folder.glob(EVENTS):
            old.unlink()
        for new in temporary.glob(EVENTS):
            shutil.move(new, folder / new.name)
        temporary.rmdir()

    def _write_events(self, folder: Path, points: Sequence[Point]) -> None:
        writer = _writer(folder)
        record = (self.run.root / RUN_RECORD).read_text(encoding="utf-8")
        # Indented by four, Markdown shows it as it is.
        writer.add_text("run", "\n".join(f"    {line}" for line in record.splitlines()), 0)
        for point in points:
            for name, value in point.figures.items():
                writer.add_scalar(name, value, point.arrival, walltime=point.seconds)
        writer.close()


def _writer(folder: Path) -> Any:
    # Imported when it is needed: it takes seconds. fairseq takes the first of these that is there, too.
    package = "torch.utils.tensorboard" if importlib.util.find_spec("tensorboard") else "tensorboardX"
    return importlib.import_module(package).SummaryWriter(str(folder))
