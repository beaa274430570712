"""Read and write the run folder RUN/: records (JSON files) and locks of a run and its stages.

The first file of a run is ``run.json``, which describes the run. The last file of a stage is ``stage-NNN/stage.json``.
A stage without this file is incomplete and runs again.

Each record (``run.json``; ``stage.json``; ``before.json``: results before a stage; ``clock.json``: wall time) has a
class that checks the file on reading. A file may have further keys: keys of one learner (``gate_trees``,
``expert_usage``) and keys of later versions.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Callable, Generic, Iterator, Mapping, Optional, Sequence, TypeVar, Union

from msgspec import Meta, Struct

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import (
    Amount,
    Count,
    Name,
    NumMegabatches,
    Positive,
    Sha256,
    as_record,
    locked,
    read_json_object,
    require_version,
    sweep,
    write_json_atomically,
)
from fairseq_alma.learners.learner import ModelId, ScheduleOptions
from fairseq_alma.options import struct_of

Megabatch = Annotated[int, Meta(ge=0, le=9_999)]
RUN_RECORD, STAGE_RECORD = "run.json", "stage.json"
RUN = "run"  # name of the run folder in a folder of ``alma-update``
FORMAT_VERSION, VERSION_KEY = 2, "format_version"
AVERAGE_FILE = "checkpoint_average.pt"  # averaged weights
BEST_FILE = "checkpoint_best.pt"  # fairseq-train's checkpoint with the lowest loss on ``valid``
BRANCH = "branch"  # folder of a branch (copy of the model that is trained with a decaying learning rate)
ENSEMBLE_FILE = "ensemble.pt"
PREDICTIONS_FILE = "ensemble-predictions.npz"  # joint predictions of all ensemble members; see `text.losses`
CLOCK, MEMBER_CLOCK = "clock.json", "clock-member-{}.json"
TRAIN_LOG = "train-member-{}.log"  # on text; ``{}`` is the member's number, or ``NUMBER-branch`` for its `BRANCH`
STAGE_REMEDY = "remove the file and repeat the training, which runs this stage again"


class StreamRecord(Struct, frozen=True):
    """Stream of a run; ``vocab_size`` and ``decontaminated`` are for text, ``dataset`` to ``augment`` for images."""

    path: Annotated[str, Meta(max_length=4096)]
    fingerprint: Name
    kind: Name
    num_megabatches: NumMegabatches
    valid: dict[str, Count]
    test: dict[str, Count]
    vocab_size: Optional[Positive] = None
    decontaminated: Optional[Positive] = None
    dataset: Optional[Name] = None
    num_classes: Optional[Positive] = None
    source: Optional[Name] = None
    seed: Optional[Count] = None
    augment: bool = False


RunOptions: Any = struct_of(ScheduleOptions, required=("wait", "replay", "drop_rest"))


class RecipeRecord(Struct, frozen=True):
    """Defaults that `text.train_options` chose for a run on text, the user's preferences, and printed description."""

    preferences: dict[str, Union[str, int, None]]
    passes: Annotated[float, Meta(gt=0, le=1e6)]
    chosen: dict[str, str]
    features: dict[str, Union[bool, str]]
    lines: list[str]


class RunRecord(Struct, frozen=True):
    """``run.json``: options and stream of a run, preset with overridden options, sha256 of the initial checkpoint."""

    learner: Name
    seed: Count
    options: RunOptions
    train_options: dict[str, Union[str, int, float, bool, None]]
    stream: StreamRecord
    versions: dict[str, Optional[str]] = {}
    preset: Optional[dict[str, Union[Name, list[Name]]]] = None
    start: Optional[dict[str, Sha256]] = None
    recipe: Optional[RecipeRecord] = None
    command: str = ""  # first call of alma-stream


class Result(Struct, frozen=True):
    """Evaluation loss in bits per token or nats per image; infinite or NaN if the model diverged."""

    loss: float

    def __post_init__(self) -> None:
        if self.loss < -1e-3:  # rounding can make the loss slightly negative
            raise ValueError(f"expected a number of at least 0, found {self.loss!r}")


class TextResult(Result, frozen=True):
    """Evaluation result on text; ``ppl`` is the perplexity per token."""

    ppl: float
    bits_per_byte: Optional[float] = None


class ImageResult(Result, frozen=True):
    """Evaluation result on images; ``error`` is the error rate from 0 to 1."""

    error: Annotated[float, Meta(ge=0, le=1)]


class BeforeRecord(Struct, frozen=True):
    """``before.json``: evaluation results before the training of a stage, by split."""

    after_growth: Optional[dict[str, TextResult]] = None
    before_growth: Optional[dict[str, TextResult]] = None
    holdouts: Optional[dict[str, TextResult]] = None


AnyResult = TypeVar("AnyResult", TextResult, ImageResult)


class Anytime(Struct, frozen=True):
    """Kind of evaluated weights, number of updates before the stage (text), and number of updates of the `BRANCH`."""

    predicts_with: Name
    first_update: Count = 0
    branch_updates: Count = 0


class Evaluation(Struct, frozen=True):
    """Command of ``--then-evaluate`` and the numbers that it printed."""

    command: str
    figures: Annotated[dict[Name, float], Meta(min_length=1, max_length=1000)]


class Holdout(TextResult, frozen=True, kw_only=True):
    """Result on the held-out part of a mega-batch; ``before`` is the result before training on the mega-batch."""

    megabatch: Megabatch
    before: Optional[TextResult] = None


class StageRecord(Struct, Generic[AnyResult], frozen=True, kw_only=True):
    """``stage.json``: cost and results of a complete stage."""

    stage: Count
    megabatches: Annotated[list[Megabatch], Meta(min_length=1, max_length=10_000)]
    num_params: Amount
    num_experts: Count
    num_members: Count
    num_updates: Count
    train_flops: Amount
    wall_seconds: Amount
    valid: AnyResult
    test: AnyResult
    anytime: Optional[Anytime] = None
    evaluation: Optional[Evaluation] = None
    before_growth: Optional[dict[str, AnyResult]] = None
    after_growth: Optional[dict[str, AnyResult]] = None


class TextStage(StageRecord[TextResult], frozen=True, kw_only=True):
    """``stage.json`` of a run on text."""

    train_tokens: Count
    test_flops_per_token: Amount
    holdouts: list[Holdout] = []
    batches: list[dict[str, Any]] = []


class ImageStage(StageRecord[ImageResult], frozen=True, kw_only=True):
    """``stage.json`` of a run on images."""

    train_images: Count
    test_flops_per_image: Amount


class ClockRecord(Struct, frozen=True):
    """``clock.json``: wall time of earlier launches (seconds), and start of the current launch (Unix time or null)."""

    spent: Amount
    started: Optional[Amount]


class StageClock:
    """Timer for the total wall time of all launches of a stage or member, saved in a clock file.

    A killed launch counts until the time of the last file change in the folder.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        before = read_clock(path)
        self.path, self.spent = path, float(before.spent)
        if before.started is not None:
            files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".lock")]
            ended = max((each.stat().st_mtime for each in files), default=0.0)
            self.spent += max(0.0, ended - before.started)
        self.began = time.monotonic()  # the system time may change while the stage runs
        self._write(self.spent, time.time())

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def stop(self) -> None:
        self._write(self.seconds(), None)

    def _write(self, spent: float, started: Optional[float]) -> None:
        # No fsync: it takes about 0.1 s, and the training of a stage on images may be as short.
        write_json_atomically(self.path, {"spent": spent, "started": started}, durable=False)


def read_clock(path: Path) -> ClockRecord:
    """Read a clock file. Return zero seconds if the file is missing or damaged, because only wall time is lost."""
    with contextlib.suppress(AlmaError, FileNotFoundError):
        return as_record(read_json_object(path, ""), ClockRecord, path, "")
    return ClockRecord(spent=0.0, started=None)


@dataclass(frozen=True)
class RunFolder:
    """Files of a run; ``root`` is the run folder, which need not exist."""

    root: Path

    @property
    def name(self) -> str:
        """Return the names of the run folder and its parent; with several seeds, also of the folder of the seed."""
        parts = self.root.resolve().parts[1:]  # also if `root` is a relative path such as ``.``
        return "/".join(parts[-3 if parts[-1].startswith("seed-") else -2 :])

    def stage_folder(self, stage: int) -> Path:
        return self.root / f"stage-{stage:03d}"

    def model_folder(self, model: ModelId) -> Path:
        """Return the folder with the checkpoints of a model, RUN/stage-NNN/member-M."""
        return self.stage_folder(model.stage) / f"member-{model.member}"

    def checkpoint(self, model: ModelId) -> Path:
        return self.model_folder(model) / LAST_CHECKPOINT

    def stages(self) -> list[int]:
        """Return the sorted numbers of the stages that have a folder; ignore names such as ``stage-001.bak``."""
        return _numbers(self.root, "stage-")

    def members(self, stage: int) -> list[ModelId]:
        return [ModelId(stage, number) for number in _numbers(self.stage_folder(stage), "member-")]

    def read_run(self, remedy: str = "give another --run folder, or remove this folder") -> Optional[dict[str, Any]]:
        """Return run.json (`RunRecord`), or None if the file is missing. Messages about damage end with ``remedy``."""
        path = self.root / RUN_RECORD
        if (content := _read(path, remedy)) is not None:
            as_record(content, RunRecord, path, remedy)
        return content

    def has_begun(self) -> bool:
        """Return whether the run has a checkpoint or a complete stage."""
        return any(
            (self.stage_folder(stage) / STAGE_RECORD).exists()
            or any(any(self.model_folder(model).glob("*.pt")) for model in self.members(stage))
            for stage in self.stages()
        )

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Write run.json. Raises AlmaError if another alma-stream process is running a stage of the run."""
        with contextlib.ExitStack() as locks:
            for folder in map(self.stage_folder, self.stages()):
                if not (folder / STAGE_RECORD).exists():  # locks of complete stages could exceed the limit of files
                    locks.enter_context(locked(folder / ".lock", f"{folder}"))
            _write(self.root / RUN_RECORD, record)

    def read_stage(self, stage: int) -> Optional[dict[str, Any]]:
        """Return the record of a stage (`StageRecord`), or None if the stage is not complete."""
        path = self.stage_folder(stage) / STAGE_RECORD
        if (content := _read(path, STAGE_REMEDY)) is None:
            return None
        is_of_images = "train_images" in content or "test_flops_per_image" in content
        kind: type[StageRecord] = ImageStage if is_of_images else TextStage
        found = as_record(content, kind, path, STAGE_REMEDY).stage
        if found != stage:
            raise AlmaError(f"{path}: damaged, expected stage {stage}, found stage {found}; {STAGE_REMEDY}")
        return content

    def write_stage(self, stage: int, record: Mapping[str, Any]) -> None:
        _write(self.stage_folder(stage) / STAGE_RECORD, record)

    @contextlib.contextmanager
    def lock_stage(self, stage: int) -> Iterator[int]:
        """Lock a stage. Raises AlmaError if another alma-stream has locked the stage.

        Yields:
            A file descriptor. A child process that inherits the descriptor keeps the lock until it exits. If
            alma-stream is killed, the stage therefore remains locked until all child processes exit.
        """
        folder = self.stage_folder(stage)
        with (
            locked(folder / ".lock", f"{folder}") as descriptor,
            _swept(lambda: (folder, *map(self.model_folder, self.members(stage)))),
        ):
            yield descriptor

    @contextlib.contextmanager
    def lock_member(self, model: ModelId) -> Iterator[list[int]]:
        """Lock a member, and take a shared lock of its stage so that `lock_stage` fails; yield both descriptors."""
        folder = self.stage_folder(model.stage)
        with (
            locked(folder / ".lock", f"{folder}", shared=True) as stage,
            locked(folder / f".lock-member-{model.member}", f"{self.model_folder(model)}") as member,
            _swept(lambda: (self.model_folder(model),)),
        ):
            yield [stage, member]

    @contextlib.contextmanager
    def lock_run(self) -> Iterator[None]:
        """Lock run.json. Raises AlmaError if another process holds the lock, or RUN/ has files but no run.json."""
        holds_files = self.root.is_dir() and any(not entry.name.startswith(".") for entry in self.root.iterdir())
        if holds_files and not (self.root / RUN_RECORD).is_file():  # last check: another process may create it
            raise AlmaError(f"{self.root}: expected a run, found other files (no {RUN_RECORD}); give a new --run")
        with locked(self.root / ".lock", f"{self.root}"):
            sweep(self.root)
            yield

    def is_tidy(self, stage: int) -> bool:
        """Return whether the temporary files of a complete stage were removed (see `mark_tidy`)."""
        return not (self.stage_folder(stage) / CLOCK).exists()

    def mark_tidy(self, stage: int) -> None:
        """Delete the clock files of a stage, so that `is_tidy` returns True."""
        for clock in self.stage_folder(stage).glob(MEMBER_CLOCK.format("*")):
            clock.unlink()
        (self.stage_folder(stage) / CLOCK).unlink(missing_ok=True)

    def start_clock(self, stage: int, member: Optional[int] = None) -> StageClock:
        """Start or resume the timer of a stage, or of a member that a separate process trains."""
        folder = self.stage_folder(stage)
        if member is None:
            return StageClock(folder / CLOCK, folder)
        return StageClock(folder / MEMBER_CLOCK.format(member), self.model_folder(ModelId(stage, member)))

    def seconds_of_members(self, stage: int) -> float:
        """Return the total training time of separately trained members, in seconds."""
        return float(sum(read_clock(clock).spent for clock in self.stage_folder(stage).glob(MEMBER_CLOCK.format("*"))))


def find_run(path: Path) -> Optional[Path]:
    """Return the run folder for ``path``, a run folder or an output folder of ``alma-update``; None without a run."""
    return next((each for each in (path, path / RUN) if (each / RUN_RECORD).is_file()), None)


def runs_of_seeds(path: Path) -> list[Path]:
    """Return the run folders in the ``--run`` folder of an alma-stream call with several seeds, sorted."""
    return [record.parent for record in sorted(path.glob(f"seed-*/{RUN_RECORD}"))]


def predicting_checkpoint(folder: RunFolder, model: ModelId, predicts_with: str) -> Path:
    """Return the checkpoint for evaluating a model; for ``predicts_with`` see `Features.predicts_with`."""
    own = folder.model_folder(model)
    files = {"average": own / AVERAGE_FILE, "best": own / BEST_FILE, "branch": own / BRANCH / LAST_CHECKPOINT}
    return files.get(predicts_with, folder.checkpoint(model))


def stage_predictor(folder: RunFolder, record: Mapping[str, Any]) -> Path:
    """Return the checkpoint evaluated after the stage of ``record``. Raises AlmaError if the checkpoint is missing."""
    stage = record["stage"]
    ensemble = folder.stage_folder(stage) / ENSEMBLE_FILE
    if ensemble.is_file():
        return ensemble
    model, members = ModelId(stage, 0), folder.members(stage)
    if members and members != [model]:
        raise AlmaError(
            f"{ensemble}: expected an ensemble, found only its members; give the checkpoint of one member, such as "
            f"{folder.checkpoint(members[0])}, or join the members with alma-ensemble"
        )
    found = predicting_checkpoint(folder, model, record.get("anytime", {}).get("predicts_with", "last"))
    if not found.is_file():
        raise AlmaError(
            f"{found}: missing, because the run does not keep weights of stage {stage}; give the newest arrival, or "
            "run alma-stream with --keep ARRIVAL or --keep-checkpoints"
        )
    return found


def _read(path: Path, remedy: str) -> Optional[dict[str, Any]]:
    if not path.is_file():
        return None
    content = read_json_object(path, remedy)
    version = content.pop(VERSION_KEY, FORMAT_VERSION)
    require_version(version, FORMAT_VERSION, path, "give another --run, or install the version that wrote the file")
    return content


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_json_atomically(path, {VERSION_KEY: FORMAT_VERSION, **record})


def _numbers(root: Path, prefix: str) -> list[int]:
    numbers = [folder.name.removeprefix(prefix) for folder in root.glob(f"{prefix}*") if folder.is_dir()]
    return sorted(int(number) for number in numbers if number.isdecimal())


@contextlib.contextmanager
def _swept(folders: Callable[[], Sequence[Path]]) -> Iterator[None]:
    """Remove temporary files in ``folders()`` before the ``with`` block, and again if the block raises an exception."""
    sweep(*folders())
    try:
        yield
    except BaseException:
        sweep(*folders())  # including folders that the block has made
        raise
