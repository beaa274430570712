"""Base classes of learners, plans of stages, the registry of learners, and presets of learner and training options.

A learner is a frozen dataclass registered with `register_learner`. Fields that `opt` declares become options of
``alma-stream``. Source: the paper, Algorithm 1 and sections 4.1 and 4.2.

A learner returns a plan for each stage: a record that the training loop executes. The command makes all plans before
training starts. Therefore, ``--dry-run`` can print the plans, a job queue can run single stages, and the loop can
remove files that no later stage needs.

A preset has the option values of the paper's text (``paper``; v1, section 5; v5, sections 4 and 5 and Appendix B.1) or
of the released code (``released-code``; github.com/facebookresearch/alma). Options on the command line take precedence
over the preset, and run.json records the name of the preset.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence, TypeVar

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import KINDS, Options, integer, opt, options_of


@dataclass(frozen=True)
class StageOptions(Options):
    """Options of a fairseq task that select the stage to train on."""

    megabatch: Optional[int] = opt(
        None, "last mega-batch of the stage to train on, numbered from 0", range=integer(0, MAX_MEGABATCHES - 1)
    )
    wait: int = opt(1, "waiting time: number of new mega-batches in each stage", range=integer(1))
    replay: bool = opt(False, "train on all mega-batches up to --megabatch")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Options of alma-stream that define the stages of a run."""

    wait: int = opt(1, "waiting time: number of new mega-batches in each stage", range=integer(1), metavar="W")
    replay: bool = opt(False, "train on all mega-batches so far (default: on the new mega-batches)")
    drop_rest: bool = opt(False, "drop the last stage if it has fewer than W new mega-batches")
    iid: Optional[int] = opt(
        None,
        "control run: one stage on the first K mega-batches, with at most the updates of K stages",
        range=integer(1),
        trait="has_iid_control",
        metavar="K",
    )
    first_wait: Optional[int] = opt(
        None, "number of mega-batches in the first stage (default: W)", range=integer(1), metavar="K"
    )


@dataclass(frozen=True)
class Stage:
    """One training stage of a stream.

    Attributes:
        index: number of the stage; stages are numbered from 0.
        arrivals: new mega-batches, in order; the stage starts when the last new mega-batch arrives.
        megabatches: mega-batches to train on: with replay, all mega-batches so far; otherwise, ``arrivals``.
    """

    index: int
    arrivals: tuple[int, ...]
    megabatches: tuple[int, ...]


def stages(
    num_megabatches: int, wait: int, replay: bool = False, drop_rest: bool = False, first_wait: Optional[int] = None
) -> list[Stage]:
    """Return the stages of a stream of B mega-batches with waiting time w; see `ScheduleOptions`.

    For B = 4 and w = 3, the first stage has mega-batches 0 to 2, and the second stage has mega-batch 3. ``drop_rest``
    drops the last stage if it has fewer than w new mega-batches, as in Table 2 of the paper.
    """
    planned: list[Stage] = []
    first, end = 0, first_wait or wait
    while first < num_megabatches and not (drop_rest and end > num_megabatches):
        arrivals = range(first, min(end, num_megabatches))
        planned.append(Stage(len(planned), tuple(arrivals), tuple(range(0 if replay else first, arrivals.stop))))
        first, end = end, end + wait
    return planned


def stage_ending_with(megabatch: int, num_megabatches: int, wait: int, replay: bool = False) -> Stage:
    """Return the stage whose last new mega-batch is ``megabatch``; raise AlmaError if no such stage exists."""
    planned = {stage.arrivals[-1]: stage for stage in stages(num_megabatches, wait, replay)}
    if megabatch not in planned:
        ends = [str(end) for end in planned]
        shown = ", ".join(ends if len(ends) <= 10 else [*ends[:3], "…", ends[-1]])
        raise AlmaError(
            f"--megabatch {megabatch} --wait {wait}: no stage ends with mega-batch {megabatch}; give one of {shown}"
        )
    return planned[megabatch]


MAX_SEED = 9_999_999
MAX_MEMBERS = 200  # maximum number of members that one stage trains
MEMBER_SEED_STEP = 10_000_000  # seed difference of consecutive members


def member_seed(seed: int, member: int) -> int:
    """Return the random seed of a member; member 0 has the seed of the run.

    fairseq seeds update u with ``seed + u`` and epoch e with ``seed + e``. The distance between two members' seeds must
    therefore exceed the number of updates in a stage. The minimum distance is 10,000,000 for up to 400 members, and is
    halved each time the number of members doubles.
    """
    turn, step = divmod(member, 400)  # 400 steps keep all seeds below 2**32 (NumPy's limit)
    # 0, 1/2, 1/4, 3/4, 1/8, … of MEMBER_SEED_STEP
    between = int(f"{turn:b}"[::-1], 2) * MEMBER_SEED_STEP >> turn.bit_length()
    return seed + MEMBER_SEED_STEP * step + between


@dataclass(frozen=True, order=True)
class ModelId:
    """Identifier of a trained model: last stage that trained the model, and member index (numbered from 0)."""

    stage: int
    member: int


@dataclass(frozen=True)
class Growth:
    """Growth step of a model between two stages.

    Attributes:
        num_new: number of experts to add to each layer that has experts.
        method: ``copy``, ``split`` or ``scratch`` for experts; ``firefly`` for neurons.
        select: criterion that selects the experts to copy or split: ``loss``, ``usage`` or ``random``.
        seed: random seed of new weights and random choices.
        share: for ``firefly``: size to add, as a fraction of the model's size before the first growth step.
        share_of: how ``share`` measures size: number of ``parameters`` or of ``neurons``.
        noise: standard deviation of the Gaussian noise that is added to copied gate rows.
        layers: new number of layers of a language model; None: the number of layers does not change.
        is_first: whether a dense language model gets its first experts.
    """

    num_new: int
    method: str
    select: str
    seed: int
    share: float = 0.0
    share_of: str = "parameters"
    noise: float = 0.0
    layers: Optional[int] = None
    is_first: bool = False


@dataclass(frozen=True)
class Training:
    """Training run of one model in one stage.

    Attributes:
        model: identifier of the trained model.
        seed: random seed of initial weights, data order and dropout.
        start: model that provides the initial weights; None: random weights.
        growth: growth step applied to the initial weights; None: no growth.
        sizes: (option of fairseq-train, value) for each size that the learner sets, such as ``--num-experts`` and 4.
        num_joint: number of models that the run trains jointly (``--learner umix``), or 1.
        joint_logits: how the logits of jointly trained models are combined: ``mean`` or ``sum``.
        bootstrap: whether to train on a bootstrap sample of the stage's examples.
    """

    model: ModelId
    seed: int
    start: Optional[ModelId] = None
    growth: Optional[Growth] = None
    sizes: tuple[tuple[str, str], ...] = ()
    num_joint: int = 1
    joint_logits: str = "mean"
    bootstrap: bool = False


@dataclass(frozen=True)
class StagePlan:
    """Plan of a stage: the training runs, and the models to evaluate.

    Attributes:
        trainings: training runs of the stage, independent of each other.
        predictors: models that predict after the stage; some may come from earlier stages.
        combine: how the predictions of several models are combined: ``probabilities`` (mean), ``logits`` (mean) or
            ``vote``.
    """

    stage: Stage
    trainings: tuple[Training, ...]
    predictors: tuple[ModelId, ...]
    combine: str = "probabilities"


# Kind of data -> name of a learner (value of ``--learner``) -> class of the learner.
LEARNERS: dict[str, dict[str, "type[Learner]"]] = {kind: {} for kind in KINDS}
Class = TypeVar("Class", bound="type[Learner]")


def register_learner(name: str, *kinds: str) -> Callable[[Class], Class]:
    """Return a decorator that registers a learner as ``--learner NAME`` for the given kinds of data (default: all).

    The decorator raises ValueError if a kind of data is unknown, or if the name belongs to another learner.
    """

    def register(learner: Class) -> Class:
        for kind in kinds or KINDS:
            if kind not in KINDS:
                raise ValueError(f"learner {name}: unknown kind of data {kind}; choose from {', '.join(KINDS)}")
            if LEARNERS[kind].get(name, learner) is not learner:
                raise ValueError(
                    f"learner {name}: already registered by {LEARNERS[kind][name].__module__}; choose another name"
                )
            LEARNERS[kind][name] = learner
        learner.name = name
        return learner

    return register


# Function that returns the values of the last occurrence of an option after ``--``; None if the option is missing.
Last = Callable[[str], Optional[tuple[str, ...]]]


@dataclass(frozen=True)
class Learner(Options):
    """Base class of learners: strategies that decide which models each stage trains, and which models predict.

    Attributes:
        name: value of ``--learner``.
        label: name in reports; None: the report uses ``name``.
        owned: option after ``--`` that the learner sets -> remedy in the error message if the user gives this option.
        arch_prefix: for images: required prefix of the architecture's name; None: every architecture is allowed.
        image_architectures: for images: (default architecture for drawings such as MNIST, default for photographs).
        train_defaults: for images: option after ``--`` -> default value for this learner.
        has_iid_control: whether ``--iid`` is supported; growing models do not support it.
        trains_members_alone: whether separate processes can train the members (``--member``, ``--jobs``).
        stacks_seeds: for images: whether one network can contain the models of several runs that differ in the seed.
        seed: random seed of the run, 0 to `MAX_SEED`.
        wait: waiting time, in mega-batches.
        init: initial weights of a stage: weights of the previous stage (``previous``) or random (``scratch``).
    """

    name: ClassVar[str]
    label: ClassVar[Optional[str]] = None
    owned: ClassVar[Mapping[str, str]] = {}
    arch_prefix: ClassVar[Optional[str]] = None
    image_architectures: ClassVar[tuple[str, str]] = ("alma_mlp", "alma_vgg")
    train_defaults: ClassVar[Mapping[str, str]] = {}
    has_iid_control: ClassVar[bool] = True
    trains_members_alone: ClassVar[bool] = False
    stacks_seeds: ClassVar[bool] = False

    seed: int
    wait: int = 1
    init: str = opt(
        "previous",
        "initial weights of a stage: weights of the previous stage, or random (default: previous; gens: scratch)",
        choices=("previous", "scratch"),
    )

    def check(self) -> None:
        """Raise ValueError if options of the learner conflict; the message begins with the name of an option."""

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Raise ValueError if an option of the learner does not match the stages of the run."""

    def check_model(self, last: Last) -> None:
        """Raise ValueError if an option of the learner does not match the model options after ``--``."""

    def plan(self, stage: Stage) -> StagePlan:
        """Return the plan of one stage: the models to train, and the models that predict after the stage."""
        raise NotImplementedError

    def starts_from(self, stage: Stage, member: int) -> Optional[ModelId]:
        """Return the model that provides a member's initial weights; None: random weights."""
        return ModelId(stage.index - 1, member) if self.init == "previous" and stage.index > 0 else None

    def train_each(self, stage: Stage, num_members: int, combine: str = "probabilities", **training: Any) -> StagePlan:
        """Return a plan that trains every member; `starts_from` selects the initial weights.

        ``training`` contains attributes that all `Training`s of the plan have in common, such as ``growth``.
        """
        trainings = tuple(
            Training(ModelId(stage.index, m), member_seed(self.seed, m), self.starts_from(stage, m), **training)
            for m in range(num_members)
        )
        return StagePlan(stage, trainings, tuple(each.model for each in trainings), combine)


@dataclass(frozen=True)
class GrowingModel(Learner):
    """Base class of learners with one model that grows between stages."""

    has_iid_control: ClassVar[bool] = False

    def check(self) -> None:
        if self.init != "previous":
            raise ValueError(
                f"--init {self.init}: --learner {self.name} grows the model of the previous stage; remove --init, or "
                "give --learner sm"
            )

    def plan(self, stage: Stage) -> StagePlan:
        # Each growth step has a different seed, so that two steps never sample the same weights.
        growth = self.growth_before(stage, self.seed + stage.index) if stage.index > 0 else None
        return self.train_each(stage, num_members=1, growth=growth)

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Return the growth step before ``stage``, with random seed ``seed``; None if the model does not grow."""
        raise NotImplementedError


def build_learner(learner: "type[Learner]", kind: str, seed: int, wait: int, given: Mapping[str, Any]) -> Learner:
    """Return a learner with the given option values; raise ValueError if a value is invalid or options conflict."""
    values = {
        name: option.default_on(kind) if given.get(name) is None else option.value(given[name])
        for name, option in options_of(learner).items()
    }
    made = learner(seed=seed, wait=wait, **values)
    made.check()
    return made


@register_learner("sm")
@dataclass(frozen=True)
class SingleModel(Learner):
    """One model, trained in every stage."""

    label: ClassVar[Optional[str]] = "SM"
    stacks_seeds: ClassVar[bool] = True

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, num_members=1)


@register_learner("moe", "images")
@dataclass(frozen=True)
class FixedMixture(SingleModel):
    """One model with a fixed number of experts in each layer (paper v1, section 5)."""

    label: ClassVar[Optional[str]] = "MoE"
    stacks_seeds: ClassVar[bool] = False
    arch_prefix: ClassVar[Optional[str]] = "alma_moe"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_moe_mlp", "alma_moe_vgg")
    train_defaults: ClassVar[Mapping[str, str]] = {"--num-experts": "4"}  # the paper does not state the number


MLP_STUDY: Mapping[str, str] = {"--optimizer": "adadelta", "--lr": "1.0"}
VGG_STUDY: Mapping[str, str] = {"--optimizer": "sgd", "--lr": "0.01", "--momentum": "0.9", "--weight-decay": "0.0001"}
BOTH_STUDIES: Mapping[str, str] = {"--max-epoch": "100", "--batch-size": "128"}


@dataclass(frozen=True)
class Preset:
    """Option values of a preset. The value None means that the option is not given.

    Attributes:
        learners: learner -> (field name -> value) for the options of the learner.
        training: options after ``--`` for all learners and networks.
        own_training: learner -> options after ``--`` for this learner; they take precedence over ``training``.
        vgg: options after ``--`` for VGG networks.
    """

    name: str
    learners: Mapping[str, Mapping[str, Optional[str]]]
    training: Mapping[str, Optional[str]]
    own_training: Mapping[str, Mapping[str, Optional[str]]] = field(default_factory=dict)
    vgg: Mapping[str, Optional[str]] = field(default_factory=dict)


PAPER = Preset(  # selects the epoch with the lowest validation loss; no early stopping
    "paper",
    learners={
        "gens": {"init": "scratch", "combine": "probabilities"},
        "umix": {"joint_logits": "mean"},
        "firefly": {"grow_share_of": "parameters"},
    },
    training={"--select": "loss", "--least-gain": "0", "--patience": None},
    vgg={"--last-pool": "mean", "--initial-weights": "he"},
)
RELEASED_CODE = Preset(  # selects the epoch with the best validation accuracy; early stopping with a patience of 25
    "released-code",
    learners={
        "gens": {"init": "previous", "combine": "logits"},
        "umix": {"joint_logits": "sum"},
        "firefly": {"grow_share_of": "neurons"},
    },
    training={"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"},
    # k_ensemble.py, agg_ensemble.py and bagging.py have no minimum improvement. k_ensemble.py, agg_ensemble.py and the
    # fixed mixture train for 100 epochs with a patience of 100, so they never stop early. bagging.py has no patience.
    own_training={
        **{name: {"--least-gain": "0", "--patience": None} for name in ("ens", "umix", "bagging")},
        "moe": {"--patience": None},
    },
    vgg={"--last-pool": "max", "--initial-weights": "default"},
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (PAPER, RELEASED_CODE)}


_DEFAULTS = {  # the package's defaults, which `with_preset` omits
    **PAPER.training, **PAPER.vgg, **{name: value for each in PAPER.learners.values() for name, value in each.items()},
}  # fmt: skip


def canonical(value: Any) -> Any:
    """Return the value of an option, converted to float if possible, so that ``0.01`` equals ``1e-2``."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return value


def with_preset(given: Mapping[str, Any], preset: Mapping[str, Optional[Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return (merged options of user and preset, names of preset options that the user overrides).

    Options of the user take precedence. Preset values that equal the package's defaults are omitted.
    """
    overridden = [name for name in preset if name in given and canonical(given[name]) != canonical(preset[name])]
    needed = {name: value for name, value in preset.items() if value != _DEFAULTS.get(name)}
    return {**needed, **given}, overridden
