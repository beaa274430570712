"""RUN/: the record of a run and of each stage, its clock and its locks.

``run.json`` is written first and describes the run; ``stage-NNN/stage.json`` is written last and declares a stage
complete. Whatever is not in a ``stage.json`` never happened. See DESIGN.md, "Contract: files".
"""

import contextlib
import re
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import (
    as_record,
    locked,
    read_json_object,
    require_version,
    sweep,
    synchronise,
    write_json_atomically,
)
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.clock import StageClock, read_clock
from fairseq_alma.runs.records import RunRecord, stage_type

RUN_RECORD, STAGE_RECORD = "run.json", "stage.json"
FORMAT_VERSION, VERSION_KEY = 2, "format_version"
"""Of both records; version 0.2.0 wrote 1."""
EVALUATED_FOLDER, EVALUATED_FILE = "exported", "evaluated.pt"
"""A model that ``--then-evaluate`` is given."""
AVERAGE = "checkpoint_average.pt"
"""The averaged weights of a trained model, as a checkpoint of their own."""
BEST = "checkpoint_best.pt"
"""Where fairseq-train keeps the checkpoint with the lowest loss on ``valid``."""
BRANCH = "branch"
"""Folder of the copy of a model whose learning rate decays."""
ENSEMBLE_FILE = "ensemble.pt"
PREDICTIONS_FILE = "ensemble-predictions.npz"
"""What the members of an ensemble of text predict together; see `text.kept_predictions`."""
CLOCK, MEMBER_CLOCK = "clock.json", "clock-member-{}.json"
RUN_REMEDY = "give another --run folder, or remove this one"
STAGE_REMEDY = "remove the file, and the same alma-stream command runs the stage again"
_STAGE = re.compile("stage-([0-9]{3}|[1-9][0-9]{3,})")
_MEMBER = re.compile("member-(0|[1-9][0-9]*)")


class RunFolder:
    """One run on disk.

    Args:
        root: RUN/; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        """The name of the run where it is shown with others: that of its folder."""
        return self.root.resolve().name

    def stage_folder(self, stage: int) -> Path:
        """Return RUN/stage-NNN."""
        return self.root / f"stage-{stage:03d}"

    def model_folder(self, model: ModelId) -> Path:
        """Return RUN/stage-NNN/member-M, which holds the model's checkpoints."""
        return self.stage_folder(model.stage) / f"member-{model.member}"

    def checkpoint(self, model: ModelId) -> Path:
        """Return the checkpoint that holds a model once it is trained."""
        return self.model_folder(model) / LAST_CHECKPOINT

    def stages(self) -> list[int]:
        """Return the numbers of the stages that have a folder, ascending; ``stage-001.bak`` is none."""
        return sorted(int(match[1]) for folder in _folders(self.root) if (match := _STAGE.fullmatch(folder.name)))

    def members(self, stage: int) -> list[ModelId]:
        """Return the models of a stage that have a folder, ascending; ``member-0.bak`` is none."""
        folders = _folders(self.stage_folder(stage))
        numbers = sorted(int(match[1]) for folder in folders if (match := _MEMBER.fullmatch(folder.name)))
        return [ModelId(stage, number) for number in numbers]

    def read_run(self, remedy: str = RUN_REMEDY) -> Optional[dict[str, Any]]:
        """Return run.json, see `RunRecord`; None where the folder is no run.

        Raises:
            AlmaError: it is damaged, which ends with ``remedy``, or of another format version.
        """
        path = self.root / RUN_RECORD
        if not path.is_file():
            return None
        content = _read(path, remedy)
        as_record(content, RunRecord, path, remedy)
        return content

    def has_begun(self) -> bool:
        """Return whether anything was trained yet; a run that failed at its first command has not begun."""
        return any(
            (self.stage_folder(stage) / STAGE_RECORD).exists()
            or any(any(self.model_folder(model).glob("*.pt")) for model in self.members(stage))
            for stage in self.stages()
        )

    def replace_run(self, record: Mapping[str, Any]) -> None:
        """Write run.json anew. Raises AlmaError if another alma-stream is at work."""
        with contextlib.ExitStack() as locks:
            for folder in map(self.stage_folder, self.stages()):
                locks.enter_context(locked(folder / ".lock", f"{folder}"))
            _write(self.root / RUN_RECORD, record)

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Make the folder a run. Raises AlmaError if it holds something else."""
        self._refuse_other_folder()
        _write(self.root / RUN_RECORD, record)

    def _refuse_other_folder(self) -> None:
        holds_something = self.root.is_dir() and any(not entry.name.startswith(".") for entry in self.root.iterdir())
        if holds_something and not (self.root / RUN_RECORD).is_file():  # in this order: a run begins with its record
            raise AlmaError(
                f"{self.root}: the folder is not empty and holds no {RUN_RECORD}; give a new folder as --run"
            )

    def read_stage(self, stage: int) -> Optional[dict[str, Any]]:
        """Return the record of a stage, see `StageRecord`; None while it is not complete.

        Raises:
            AlmaError: it is damaged, or of another format version.
        """
        path = self.stage_folder(stage) / STAGE_RECORD
        if not path.is_file():
            return None
        content = _read(path, STAGE_REMEDY)
        found = as_record(content, stage_type(content), path, STAGE_REMEDY).stage
        if found != stage:
            raise AlmaError(f"{path}: damaged, it is the record of stage {found}; {STAGE_REMEDY}")
        return content

    def write_stage(self, stage: int, record: Mapping[str, Any]) -> None:
        """Declare a stage complete."""
        _write(self.stage_folder(stage) / STAGE_RECORD, record)

    def discard_stage(self, stage: int) -> None:
        """Declare that a stage is not complete after all."""
        path = self.stage_folder(stage) / STAGE_RECORD
        path.unlink()
        synchronise(path.parent)

    @contextlib.contextmanager
    def lock_stage(self, stage: int) -> Iterator[int]:
        """Hold the lock of a stage; a second alma-stream on the same stage is refused.

        Yields:
            A file descriptor. A child process that inherits it keeps the lock as long as it lives, so that a stage
            whose alma-stream was killed is free again only when nothing writes to its checkpoints any more.
        """
        folder = self.stage_folder(stage)
        with (
            locked(folder / ".lock", f"{folder}") as descriptor,
            _swept(folder, *map(self.model_folder, self.members(stage))),
        ):
            yield descriptor

    @contextlib.contextmanager
    def lock_member(self, model: ModelId) -> Iterator[list[int]]:
        """Hold the lock of one member of a stage; other members are free, the stage is not; yields descriptors."""
        folder = self.stage_folder(model.stage)
        with (
            locked(folder / ".lock", f"{folder}", shared=True) as stage,
            locked(folder / f".lock-member-{model.member}", f"{self.model_folder(model)}") as member,
            _swept(self.model_folder(model)),
        ):
            yield [stage, member]

    @contextlib.contextmanager
    def lock_run(self) -> Iterator[None]:
        """Hold the lock of run.json for a moment; whoever comes second waits."""
        self._refuse_other_folder()
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / ".lock", f"{self.root}"):
            sweep(self.root)
            yield

    def is_tidy(self, stage: int) -> bool:
        """Return whether nothing is left to remove after a complete stage."""
        return not (self.stage_folder(stage) / CLOCK).exists()

    def mark_tidy(self, stage: int) -> None:
        """Note that nothing is left to remove: the stage's clock, of no more use, goes last."""
        for clock in self.stage_folder(stage).glob(MEMBER_CLOCK.format("*")):
            clock.unlink()
        (self.stage_folder(stage) / CLOCK).unlink(missing_ok=True)

    def start_clock(self, stage: int, member: Optional[int] = None) -> StageClock:
        """Resume counting the time that a stage takes, or one member of it that is trained alone."""
        folder = self.stage_folder(stage)
        if member is None:
            return StageClock(folder / CLOCK, folder)
        return StageClock(folder / MEMBER_CLOCK.format(member), self.model_folder(ModelId(stage, member)))

    def is_member_trained(self, model: ModelId) -> bool:
        """Return whether a member that is trained alone is trained to its end: its clock has stopped."""
        if self.read_stage(model.stage) is not None:
            return True
        clock = self.stage_folder(model.stage) / MEMBER_CLOCK.format(model.member)
        return clock.is_file() and (found := read_clock(clock)).spent > 0 and found.started is None

    def seconds_of_members(self, stage: int) -> float:
        """Return the seconds that members took that were trained alone, one after the other or not."""
        return float(sum(read_clock(clock).spent for clock in self.stage_folder(stage).glob(MEMBER_CLOCK.format("*"))))


def predicting_checkpoint(folder: RunFolder, model: ModelId, predicts_with: str) -> Path:
    """Return the checkpoint by which a trained model predicts; see `Features.predicts_with`."""
    own = folder.model_folder(model)
    files = {"average": own / AVERAGE, "best": own / BEST, "branch": own / BRANCH / LAST_CHECKPOINT}
    return files.get(predicts_with, folder.checkpoint(model))


def stage_predictor(folder: RunFolder, record: Mapping[str, Any]) -> Path:
    """Return the checkpoint whose figures the record of a stage has. Raises AlmaError if it is not kept."""
    stage = record["stage"]
    ensemble = folder.stage_folder(stage) / ENSEMBLE_FILE
    if ensemble.is_file():
        return ensemble
    model, members = ModelId(stage, 0), folder.members(stage)
    # Members of an ensemble that grows are numbered on from stage to stage; a uniform mixture is one model.
    if members and members != [model]:
        raise AlmaError(
            f"{ensemble}: the ensemble of stage {stage} is not kept, as its members are; join these by alma-ensemble, "
            "or run alma-stream --keep-checkpoints"
        )
    found = predicting_checkpoint(folder, model, record.get("anytime", {}).get("predicts_with", "last"))
    if not found.is_file():
        raise AlmaError(
            f"{found}: the weights of stage {stage} are not kept; alma-stream --keep ARRIVAL keeps those of that "
            "arrival, --keep-checkpoints all, and without an arrival the newest are there"
        )
    return found


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """Read a record of a version that is known; the version is left out of what is returned."""
    content = read_json_object(path, remedy)
    version = content.pop(VERSION_KEY, FORMAT_VERSION)
    if version == 1:
        raise AlmaError(
            f"{path}: written by fairseq_alma 0.2.0, whose runs are not read any more; give another --run, or install "
            "fairseq_alma 0.2.0"
        )
    require_version(version, FORMAT_VERSION, path, "install the version that wrote it")
    return content


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_json_atomically(path, {VERSION_KEY: FORMAT_VERSION, **record})


def _folders(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []


@contextlib.contextmanager
def _swept(*folders: Path) -> Iterator[None]:
    """Remove temporary files, of this package and of fairseq: before the block, and if it fails."""

    def sweep_all() -> None:
        for folder in folders:
            sweep(folder)
            for entry in folder.glob("checkpoint*.pt.tmp"):  # as fairseq names them
                entry.unlink(missing_ok=True)

    sweep_all()
    try:
        yield
    except BaseException:
        sweep_all()
        raise
