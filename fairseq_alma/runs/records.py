"""What ``run.json``, ``stage.json`` and ``clock.json`` hold, declared once and checked where they are read.

Keys that are not declared here are kept as they are: those of one learner (``gate_trees``, ``expert_usage``), and those
of a version to come. See DESIGN.md, "Contract: files".
"""

from typing import Annotated, Any, Mapping, Optional, Union

from msgspec import Meta, Struct

from fairseq_alma.files import Amount, Count, Name, NumMegabatches, Positive, Sha256
from fairseq_alma.learners.learner import ScheduleOptions
from fairseq_alma.options import struct_of

Megabatch = Annotated[int, Meta(ge=0, le=9_999)]
_ROUNDING = 1e-3  # the mean of probabilities that are all 1 may have a loss a little below 0


class Counts(Struct, frozen=True):
    """What a split of the stream has."""

    num_tokens: Count = 0
    num_bytes: Count = 0
    num_images: Count = 0


class StreamRecord(Struct, frozen=True):
    """The stream that a run learns from; the last four are of a stream of images, ``decontaminated`` of text."""

    path: Annotated[str, Meta(max_length=4096)]
    fingerprint: Name
    kind: Name
    num_megabatches: NumMegabatches
    valid: Counts
    test: Counts
    vocab_size: Optional[Positive] = None
    decontaminated: Optional[Positive] = None
    dataset: Optional[Name] = None
    num_classes: Optional[Positive] = None
    source: Optional[Name] = None
    seed: Optional[Count] = None


class LearnerOptions(Struct):
    """The option of each learner that every run has."""

    init: Name


RunOptions: Any = struct_of(ScheduleOptions, base=LearnerOptions, required=("wait", "replay", "drop_rest"))
"""The options of alma-stream that every run has; others are kept beside them."""


class PresetRecord(Struct, frozen=True):
    """The named settings of a run, and the options that the user gave with other values."""

    name: Name
    overridden: list[Name] = []


class StartRecord(Struct, frozen=True):
    """The checkpoint that the run begins with."""

    sha256: Sha256


class RecipeRecord(Struct, frozen=True):
    """What was chosen for a run on text and why; see `text.defaults`."""

    preferences: dict[str, Union[str, int, None]]
    passes: Annotated[float, Meta(gt=0, le=1e6)]
    chosen: dict[str, str]
    features: dict[str, Union[bool, str]]
    lines: list[str]


class RunRecord(Struct, frozen=True):
    """``run.json``: what a run is."""

    learner: Name
    seed: Count
    options: RunOptions
    train_options: dict[str, Union[str, int, float, bool, None]]
    stream: StreamRecord
    versions: dict[str, Optional[str]] = {}
    preset: Optional[PresetRecord] = None
    start: Optional[StartRecord] = None
    recipe: Optional[RecipeRecord] = None


class TextResult(Struct, frozen=True):
    """A test on text: loss in bits per token, perplexity, bits per byte; infinite or NaN where a model diverged."""

    loss: float
    ppl: float
    bits_per_byte: Optional[float] = None

    def __post_init__(self) -> None:
        _refuse_below(0, self.loss, self.ppl)


class ImageResult(Struct, frozen=True):
    """A test on images: loss in nats, infinite or NaN where a model diverged; error from 0 to 1."""

    loss: float
    error: Annotated[float, Meta(ge=0, le=1)]

    def __post_init__(self) -> None:
        _refuse_below(0, self.loss)


class BeforeRecord(Struct, frozen=True):
    """``before.json``: what was measured before the training of a stage, by split."""

    after_growth: Optional[dict[str, TextResult]] = None
    before_growth: Optional[dict[str, TextResult]] = None
    holdouts: Optional[dict[str, TextResult]] = None


class TextGrowth(Struct, frozen=True):
    """The loss on the validation set right after a growth step, or right before it."""

    valid: TextResult


class ImageGrowth(Struct, frozen=True):
    """See `TextGrowth`."""

    valid: ImageResult


class AnytimeStage(Struct, frozen=True):
    """How a stage of anytime training began, and what was tested; see `training.feature`."""

    first_update: Count
    predicts_with: Name
    branch_updates: Count = 0


class Evaluation(Struct, frozen=True):
    """What a command of the user's said of a stage's model (``--then-evaluate``)."""

    command: str
    figures: Annotated[dict[Name, float], Meta(min_length=1, max_length=1000)]


class ImageAnytime(Struct, frozen=True):
    """What was tested after a stage of images, and what it began with; see `LRBranch`."""

    predicts_with: Name
    branch_updates: Count = 0


class Holdout(Struct, frozen=True):
    """A test on what is held out of an arrival (mega-batch, from 0), and before the stage that trains on it."""

    megabatch: Megabatch
    loss: Amount
    ppl: float
    bits_per_byte: Optional[Amount] = None
    before: Optional[TextResult] = None


class StageRecord(Struct, frozen=True):
    """``stage.json``: what one stage cost and what came of it; see `TextStage` and `ImageStage`."""

    stage: Count
    megabatches: Annotated[list[Megabatch], Meta(min_length=1, max_length=10_000)]
    num_params: Amount
    num_experts: Count
    num_members: Count
    num_updates: Count
    train_flops: Amount
    wall_seconds: Amount
    evaluation: Optional[Evaluation] = None


class TextStage(StageRecord, frozen=True, kw_only=True):
    """A stage of a run on text."""

    train_tokens: Count
    test_flops_per_token: Amount
    valid: TextResult
    test: TextResult
    anytime: Optional[AnytimeStage] = None
    holdouts: list[Holdout] = []
    batches: list[dict[str, Any]] = []
    before_growth: Optional[TextGrowth] = None
    after_growth: Optional[TextGrowth] = None


class ImageStage(StageRecord, frozen=True, kw_only=True):
    """A stage of a run on images."""

    train_images: Count
    test_flops_per_image: Amount
    valid: ImageResult
    test: ImageResult
    anytime: Optional[ImageAnytime] = None
    before_growth: Optional[ImageGrowth] = None
    after_growth: Optional[ImageGrowth] = None


class ClockRecord(Struct, frozen=True):
    """``clock.json``: seconds of the launches before, and since when the present one runs (seconds since 1970)."""

    spent: Amount
    started: Optional[Amount]


def stage_type(content: Mapping[str, Any]) -> type[StageRecord]:
    """Return the type that a ``stage.json`` must have, by the kind of data that it says it is about."""
    return ImageStage if "train_images" in content or "test_flops_per_image" in content else TextStage


def _refuse_below(least: float, *numbers: float) -> None:
    for number in numbers:
        if number < least - _ROUNDING:
            raise ValueError(f"{number!r} found, a number of at least {least} is needed")
