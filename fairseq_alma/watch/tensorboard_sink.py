"""Points of a run for TensorBoard, and its event files, through the package that fairseq uses itself."""

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.watch.arrival_curves import ArrivalPoint

TENSORBOARD = "--tensorboard-logdir"
EVENTS = "events.out.tfevents.*"
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "tensorboardX": "tensorboardX"}
OWNER = "run.txt"


class TensorBoardSink:
    """Writes a run's points into event files: one in each launch, which begins with all that is known.

    A TensorBoard that is open reads on where it was, so a file only ever grows.

    Args:
        run: the run.
        logdir: of TensorBoard, shared by as many runs as one likes.
    """

    def __init__(self, run: RunFolder, logdir: Path) -> None:
        self.run = run
        self.logdir = logdir
        self.folder = logdir / run.name
        self.file: Optional[Path] = None
        self.shown: list[ArrivalPoint] = []

    def require(self) -> None:
        """See `arrival_curves.Sink`."""
        if event_writer() is None:
            raise AlmaError(
                f"{TENSORBOARD} {self.logdir}: TensorBoard is not installed; pip install tensorboard, or "
                "leave the option out"
            )
        try:
            self._claim_folder()
        except OSError as error:
            raise AlmaError(f"{TENSORBOARD} {self.logdir}: {error}; give a folder to write to") from error

    def write(self, points: Sequence[ArrivalPoint]) -> None:
        """See `arrival_curves.Sink`."""
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

    def _claim_folder(self) -> None:
        """Make the log folder the run's own. Raises AlmaError if another run of the same name uses it."""
        owner, me = self.folder / OWNER, str(self.run.root.resolve())
        before = owner.read_text(encoding="utf-8").strip() if owner.is_file() else me
        # A run that was moved or removed has no claim.
        if before != me and (Path(before) / RUN_RECORD).is_file():
            raise AlmaError(
                f"{TENSORBOARD} {self.logdir}: {self.folder} shows another run, {before}; "
                "give another folder, or the run's folder another name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        owner.write_text(f"{me}\n", encoding="utf-8")

    def _add_file(self, new: Path) -> Path:
        """Put an event file beside that of the launch before, which a TensorBoard that is open still reads."""
        folder = self.folder / "arrivals"
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(EVENTS))[:-1]:
            old.unlink()
        shutil.move(new, folder / new.name)
        return folder / new.name

    def _write_events(self, folder: Path, points: Sequence[ArrivalPoint], first_step: int) -> None:
        writer = open_events(folder, first_step)
        if self.file is None:
            record = (self.run.root / RUN_RECORD).read_text(encoding="utf-8")
            # Indented by four, Markdown shows it as it is.
            writer.add_text("run", "\n".join(f"    {line}" for line in record.splitlines()), 0)
        for point in points:
            for name, value in point.figures.items():
                writer.add_scalar(name, value, point.arrival, walltime=point.seconds)
        writer.close()


def event_writer() -> Optional[str]:
    """Return the module that writes event files; None: none is installed. fairseq takes the first of these, too."""
    return next((module for package, module in PACKAGES.items() if importlib.util.find_spec(package)), None)


def open_events(folder: Path, first_step: int) -> Any:
    """Return a ``SummaryWriter`` with a new event file.

    Args:
        folder: where the file goes.
        first_step: what TensorBoard has read from this step on, in older files of the folder, it forgets.
    """
    # Imported when it is needed: it takes seconds.
    module = importlib.import_module(event_writer() or PACKAGES["tensorboard"])
    return module.SummaryWriter(str(folder), purge_step=first_step)


def rewind_curves(folder: Path, num_updates: int) -> None:
    """Take back what the curves of a training show beyond its last checkpoint: it will be done, and drawn, again.

    Args:
        folder: with the event files of the training, in whatever subfolders.
        num_updates: updates at that checkpoint; 0: the training begins from its start.
    """
    files = list(folder.rglob(EVENTS))
    if num_updates == 0:
        for file in files:
            file.unlink()
        return
    for parent in sorted({file.parent for file in files}):
        # Twice, because TensorBoard takes the first such note in a folder for the begin of it all.
        for _ in range(2):
            open_events(parent, num_updates + 1).close()


def _num_same(before: Sequence[ArrivalPoint], now: Sequence[ArrivalPoint]) -> int:
    """Return how many points at the begin are the same."""
    num_same = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        num_same += 1
    return num_same
