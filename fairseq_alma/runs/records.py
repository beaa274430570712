"""Record types that check ``run.json``, ``stage.json``, ``before.json`` and ``clock.json`` when a file is read.

A file may have further keys: keys of one learner (``gate_trees``, ``expert_usage``) and keys of later versions.
"""

from typing import Annotated, Any, Generic, Mapping, Optional, TypeVar, Union

from msgspec import Meta, Struct

from fairseq_alma.files import Amount, Count, Name, NumMegabatches, Positive, Sha256
from fairseq_alma.learners.learner import ScheduleOptions
from fairseq_alma.options import struct_of

Megabatch = Annotated[int, Meta(ge=0, le=9_999)]


class StreamRecord(Struct, frozen=True):
    """Stream of a run. The last four fields are for images; ``vocab_size`` and ``decontaminated`` are for text."""

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


class LearnerOptions(Struct):
    """Record of the options that all learners have."""

    init: Name


RunOptions: Any = struct_of(ScheduleOptions, base=LearnerOptions, required=("wait", "replay", "drop_rest"))


class RecipeRecord(Struct, frozen=True):
    """Defaults that `text.defaults` chose for a run on text, with the preferences of the user and a description."""

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


class Result(Struct, frozen=True):
    """Evaluation loss in bits per token or nats per image; infinite or NaN if the model diverged."""

    loss: float

    def __post_init__(self) -> None:
        if self.loss < -1e-3:  # rounding can make the loss slightly negative
            raise ValueError(f"expected a number of at least 0, found {self.loss!r}")


class TextResult(Result, frozen=True):
    """Evaluation result on text."""

    ppl: float
    bits_per_byte: Optional[float] = None


class ImageResult(Result, frozen=True):
    """Evaluation result on images."""

    error: Annotated[float, Meta(ge=0, le=1)]


class BeforeRecord(Struct, frozen=True):
    """``before.json``: evaluation results before the training of a stage, by split."""

    after_growth: Optional[dict[str, TextResult]] = None
    before_growth: Optional[dict[str, TextResult]] = None
    holdouts: Optional[dict[str, TextResult]] = None


AnyResult = TypeVar("AnyResult", TextResult, ImageResult)


class Anytime(Struct, frozen=True):
    """Record of training features: evaluated weights, first update (text), branch updates (see `run_folder.BRANCH`)."""

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
    """A stage of a run on text."""

    train_tokens: Count
    test_flops_per_token: Amount
    holdouts: list[Holdout] = []
    batches: list[dict[str, Any]] = []


class ImageStage(StageRecord[ImageResult], frozen=True, kw_only=True):
    """A stage of a run on images."""

    train_images: Count
    test_flops_per_image: Amount


class ClockRecord(Struct, frozen=True):
    """``clock.json``, the wall time of a stage: seconds of earlier launches, Unix time of the current start or null."""

    spent: Amount
    started: Optional[Amount]


def stage_type(content: Mapping[str, Any]) -> type[StageRecord]:
    """Return the record type for the content of a ``stage.json``."""
    return ImageStage if "train_images" in content or "test_flops_per_image" in content else TextStage
