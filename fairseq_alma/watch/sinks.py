"""Where the points of a run go: TensorBoard and Weights & Biases, asked for with fairseq's own options.

``--tensorboard-logdir DIR`` makes ``DIR/RUN/`` the one log folder of the run, RUN being the name of its folder:
``arrivals/`` has the figures of `ArrivalCurves`, ``stage-NNN/member-M/`` what fairseq-train says of each update, which
would overwrite one another in one place. With ``--wandb-project`` the run and each training are a run each, in one
group.

The figures with arrivals on the x axis are drawn anew from the ``stage.json`` files each time, so that no kill leaves a
point twice or a gap, and a run can be drawn when it is complete.
"""

import importlib
import importlib.util
import itertools
import os
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.records import WandbRecord
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.terminal import tell

WRITE_EVERY_SECONDS = 10.0
# At most this part of the time goes into writing.
SHARE = 0.05
# What an update costs; a learner that waits spends none of it.
SPENT = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")


@dataclass(frozen=True)
class ArrivalPoint:
    """What is known after an arrival (from 0), and since when in seconds since 1970; a slash groups names."""

    arrival: int
    seconds: float
    figures: Mapping[str, float]


class Sink(Protocol):
    """Takes the points of a run."""

    def require(self) -> None:
        """Raise AlmaError, with what to do, unless points can be written."""

    def write(self, points: Sequence[ArrivalPoint]) -> None:
        """Show these points in place of those shown before. Raises AlmaError or OSError."""


class ArrivalCurves:
    """Keeps what is shown of a run's arrivals up to date.

    Args:
        run: its folder; run.json is there already.
        plans: of all its stages.
        sinks: where the points go; none: nothing is done.
    """

    def __init__(self, run: RunFolder, plans: Sequence[StagePlan], sinks: Sequence[Sink]) -> None:
        self.run = run
        self.plans = plans
        self.sinks = sinks
        self.is_behind = True  # what is complete already
        self.next = 0.0

    def begin(self) -> None:
        """Make sure that points can be shown; they are when there is time. Raises AlmaError where they cannot."""
        for sink in self.sinks:
            sink.require()

    def note_stage(self) -> None:
        """Note that a stage is complete now."""
        self.is_behind = True

    def catch_up(self) -> None:
        """Show what is complete and not shown yet, unless something was shown just before."""
        if time.monotonic() >= self.next:
            self.end()

    def end(self) -> None:
        """Show what is complete and not shown yet; what goes wrong is said, and tried again."""
        if not self.is_behind:
            return
        began = time.monotonic()
        try:
            if self.sinks:
                with self.run.lock_run():
                    points = arrival_points(self.run, self.plans)
                    for sink in self.sinks:
                        sink.write(points)
            self.is_behind = False
        except (AlmaError, OSError) as error:
            # A training of days does not end for want of a picture.
            tell(f"note: {error}; training continues, and its curves are drawn again later", sys.stderr)
        now = time.monotonic()
        self.next = now + max(WRITE_EVERY_SECONDS, (now - began) / SHARE)


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[ArrivalPoint]:
    """Return what is known of a run with these stages: one point for each arrival from the first update on.

    While a learner waits, the model of its last update counts, as in the paper's section 3.1.
    """
    points = []
    before: Optional[dict[str, float]] = None
    total = 0.0
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            before = None
            continue
        seconds = (run.stage_folder(plan.stage.index) / STAGE_RECORD).stat().st_mtime
        if before is not None:
            waiting = {**before, **{f"stage/{name}": 0.0 for name in SPENT if f"stage/{name}" in before}}
            points += [ArrivalPoint(arrival, seconds, waiting) for arrival in plan.stage.arrivals[:-1]]
        total += float(record["train_flops"])
        before = {**_flatten(record), "total/train_flops": total}
        points.append(ArrivalPoint(plan.stage.last_arrival, seconds, before))
    return points


def _flatten(record: Mapping[str, Any], group: str = "") -> dict[str, float]:
    """Return the numbers of a stage's record: ``test/loss``, ``stage/num_params``, …"""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{group}{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group or 'stage/'}{name}"] = float(value)
    return figures


TENSORBOARD, WANDB = "--tensorboard-logdir", "--wandb-project"
CURVE_OPTIONS = {TENSORBOARD: "a folder", WANDB: "the name of a project"}
EVENTS = "events.out.tfevents.*"
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "tensorboardX": "tensorboardX"}
OWNER = "run.txt"
WANDB_RECORD = "wandb.json"


@dataclass(frozen=True)
class CurveOptions:
    """The curves that a user wants.

    Attributes:
        tensorboard: folder for TensorBoard, shared by as many runs as one likes; None: not wanted.
        wandb_project: project of Weights & Biases; None: not wanted.
    """

    tensorboard: Optional[Path] = None
    wandb_project: Optional[str] = None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "CurveOptions":
        """Find out from the options after ``--``: option and value.

        Raises:
            ValueError: one of the options is cut short or without its value.
        """
        for full, what in CURVE_OPTIONS.items():
            for name in options:
                if name != full and len(name) > 4 and full.startswith(name):
                    raise ValueError(f"{name} after the --: write {full}")
            if full in options and not options[full]:
                raise ValueError(f"{full} after the --: {what} is needed behind it")
        folder = options.get(TENSORBOARD)
        return cls(Path(folder) if folder else None, options.get(WANDB))

    def sinks(self, run: RunFolder) -> list[Sink]:
        """Return where the points of a run go."""
        sinks: list[Sink] = [TensorBoardSink(run, self.tensorboard)] if self.tensorboard is not None else []
        return [*sinks, WandbSink(run, self.wandb_project)] if self.wandb_project is not None else sinks

    def curves(self, run: RunFolder, model: ModelId) -> Path:
        """Return the folder for the curves of one training."""
        assert self.tensorboard is not None
        return self.tensorboard / _name(run, model)

    def rewind(self, run: RunFolder, model: ModelId, num_updates: int) -> None:
        """Take the curves of a training back to its last checkpoint, so that nothing is drawn twice.

        Args:
            run: the run.
            model: that is trained.
            num_updates: updates at the checkpoint; 0: the training begins from its start.
        """
        if self.tensorboard is not None:
            rewind_curves(self.curves(run, model), num_updates)
        if num_updates == 0:
            _identity_file(run, model).unlink(missing_ok=True)

    def wandb_environment(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment that names a training to Weights & Biases."""
        named = {"WANDB_NAME": _name(run, model), "WANDB_RUN_GROUP": run.name}
        return {} if self.wandb_project is None else named

    def wandb_identity(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment by which a training that was cut off resumes its curves."""
        if self.wandb_project is None:
            return {}
        return {"WANDB_RUN_ID": wandb_id(_identity_file(run, model)), "WANDB_RESUME": "allow"}


def _name(run: RunFolder, model: ModelId) -> str:
    return f"{run.name}/{run.model_folder(model).relative_to(run.root)}"


def _identity_file(run: RunFolder, model: ModelId) -> Path:
    return run.stage_folder(model.stage) / f"wandb-member-{model.member}.json"


class TensorBoardSink:
    """Writes a run's points into event files: one in each launch, which begins with all that is known.

    A TensorBoard that is open reads on where it was, so a file only ever grows. ``logdir`` is shared by as many runs
    as one likes. Written through the package that fairseq uses itself.
    """

    def __init__(self, run: RunFolder, logdir: Path) -> None:
        self.run = run
        self.logdir = logdir
        self.folder = logdir / run.name
        self.file: Optional[Path] = None
        self.shown: list[ArrivalPoint] = []

    def require(self) -> None:
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
        pairs = zip(self.shown, points, strict=False)
        num_same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
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


class WandbSink:
    """Writes a run's points into one run of a project of Weights & Biases over all launches, online or offline."""

    def __init__(self, run: RunFolder, project: str) -> None:
        self.run = run
        self.project = project

    def require(self) -> None:
        found = importlib.util.find_spec("wandb")
        # Weights & Biases makes a folder of its own name, which can be imported, and is of no use.
        if found is None or found.origin is None:
            raise AlmaError(
                f"{WANDB} {self.project}: Weights & Biases is not installed; pip install wandb, or leave the option out"
            )
        # Is there a login?
        self.write([])

    def write(self, points: Sequence[ArrivalPoint]) -> None:
        import wandb

        identity = wandb_id(self.run.root / WANDB_RECORD)
        try:
            shown = wandb.init(
                project=self.project,
                id=identity,
                resume="allow",
                name=os.environ.get("WANDB_NAME", self.run.name),
                group=self.run.name,
                job_type="arrivals",
                config=self.run.read_run(),
                settings=wandb.Settings(silent=True, console="off"),
            )
            shown.define_metric("arrival")
            shown.define_metric("*", step_metric="arrival")
            # Online, the points before this one are there already; offline, each launch writes all.
            first = shown.step
            for point in points:
                if point.arrival >= first:
                    shown.log({**point.figures, "arrival": point.arrival}, step=point.arrival)
            files = Path(shown.dir).parent
            shown.finish()
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise AlmaError(
                f"{WANDB} {self.project}: Weights & Biases refuses ({reason}); call wandb login, or set "
                "WANDB_MODE=offline"
            ) from error
        finally:
            # Its threads and its service would be handed on to the processes that are started here.
            wandb.teardown()
        # Of what was written offline before, `wandb sync` would send each point once for each time it was written.
        for folder in files.parent.glob(f"offline-run-*-{identity}*"):
            if folder.name != files.name:
                shutil.rmtree(folder, ignore_errors=True)


def wandb_id(path: Path) -> str:
    """Return the identity that Weights & Biases knows something by; drawn when first asked for, and kept in a file."""
    if not path.is_file():
        write_json_atomically(path, {"id": secrets.token_hex(4)})
    remedy = "remove the file; its curves begin anew"
    return as_record(read_json_object(path, remedy), WandbRecord, path, remedy).id
