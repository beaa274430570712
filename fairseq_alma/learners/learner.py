"""The base of every learner: its options, the kinds of data that it supports, and a plan for each stage.

A plan is data; the loop and the back ends carry it out. It is known before anything runs, so ``--dry-run`` can print
it, a queue can run one stage alone, and files that no later stage needs can be removed.

A learner is one frozen dataclass under `register_learner`; its fields made by `opt` are its options. ``alma-stream``
reads everything from the class. Source: the paper, Algorithm 1 and sections 4.1 and 4.2.
"""

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence, TypeVar

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import KINDS, Options, integer, opt, options_of


@dataclass(frozen=True)
class StageOptions(Options):
    """Options of a fairseq task that select the stage to train on."""

    megabatch: Optional[int] = opt(
        None, "train on the stage that ends with this mega-batch, from 0", range=integer(0, MAX_MEGABATCHES - 1)
    )
    wait: int = opt(1, "waiting time: mega-batches of a stage", range=integer(1))
    replay: bool = opt(False, "train on all mega-batches up to this one")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Options of alma-stream that define the stages of a run."""

    wait: int = opt(1, "waiting time: number of new mega-batches of a stage", range=integer(1), metavar="W")
    replay: bool = opt(False, "train on all mega-batches so far (default: on the new ones)")
    drop_rest: bool = opt(False, "drop the last mega-batches if fewer than W remain")
    iid: Optional[int] = opt(
        None,
        "control: one stage on the first K mega-batches, with K times the updates",
        range=integer(1),
        trait="has_iid_control",
        metavar="K",
    )
    first_wait: Optional[int] = opt(
        None, "mega-batches of the first stage (default: W)", range=integer(1), metavar="K", quiet=True
    )
    passes_of_new: bool = opt(False, "with --replay: --passes counts passes over the new mega-batches only", quiet=True)


@dataclass(frozen=True)
class Stage:
    """One update of the model.

    Attributes:
        index: number of the stage, from 0.
        arrivals: the new mega-batches, in order; the stage runs when the last one has arrived.
        megabatches: the mega-batches that it trains on: the arrivals, or with replay all so far.
    """

    index: int
    arrivals: tuple[int, ...]
    megabatches: tuple[int, ...]

    @property
    def last_arrival(self) -> int:
        """The mega-batch whose arrival starts this stage."""
        return self.arrivals[-1]


def stages(
    num_megabatches: int, wait: int, replay: bool = False, drop_rest: bool = False, first_wait: Optional[int] = None
) -> list[Stage]:
    """List the stages of a stream.

    Args:
        num_megabatches: B, at least 1.
        wait: waiting time w, at least 1.
        replay: train on everything that has arrived.
        drop_rest: drop the last ``B mod w`` mega-batches (Table 2's w3 rows); otherwise they are a shorter last stage.
        first_wait: waiting time of the first stage; None: w.

    Returns:
        The stages in order: for B = 4 and w = 3, mega-batches 0-2 and then 3. Empty if w > B and the rest is dropped.
    """
    if num_megabatches < 1 or wait < 1:
        raise ValueError(f"need at least one mega-batch and a wait of at least 1, got {num_megabatches} and {wait}")
    planned: list[Stage] = []
    first = 0
    while first < num_megabatches:
        gathered = first_wait if first == 0 and first_wait is not None else wait
        end = min(first + gathered, num_megabatches)
        if drop_rest and end - first < gathered:
            break
        planned.append(Stage(len(planned), tuple(range(first, end)), tuple(range(0 if replay else first, end))))
        first = end
    return planned


def stage_ending_with(megabatch: int, num_megabatches: int, wait: int, replay: bool = False) -> Stage:
    """Return the stage whose last arrival is a mega-batch (from 0). Raises AlmaError if there is none."""
    planned = {stage.last_arrival: stage for stage in stages(num_megabatches, wait, replay)}
    if megabatch not in planned:
        ends = ", ".join(str(end) for end in planned)
        raise AlmaError(f"--megabatch {megabatch} --wait {wait}: no stage ends there; give one of {ends}")
    return planned[megabatch]


MAX_SEED = 9_999_999
MAX_MEMBERS = 200
"""Largest number of members that one stage trains."""
MEMBER_SEED_STEP, _STEPS_OF_SEEDS = 10_000_000, 400
"""Distance between the seeds of members, and how many steps fit below 2**32, NumPy's limit for seeds."""


def member_seed(seed: int, member: int) -> int:
    """Return the seed of a member of a run; member 0 has the run's own seed.

    fairseq seeds update u with ``seed + u`` and epoch e with ``seed + e``, so the distance of two seeds must exceed the
    updates of a stage: 10,000,000 for the first 400 members, half of it for the next 400, then a quarter, ….

    Args:
        seed: of the run, 0 to `MAX_SEED`.
        member: number of the member in the run.
    """
    turn, step = divmod(member, _STEPS_OF_SEEDS)
    between = int(f"{turn:b}"[::-1], 2) * MEMBER_SEED_STEP >> turn.bit_length()  # 0, 1/2, 1/4, 3/4, 1/8, … of a step
    return seed + MEMBER_SEED_STEP * step + between


@dataclass(frozen=True, order=True)
class ModelId:
    """A trained model: the stage that trained it last, and its member number."""

    stage: int
    member: int


@dataclass(frozen=True)
class Growth:
    """Growth of a model between two stages.

    Attributes:
        num_new: experts to add to each layer that has experts.
        method: ``copy``, ``split`` or ``scratch`` for experts; ``firefly`` for neurons.
        select: which experts are copied or split: ``loss``, ``usage`` or ``random``.
        seed: of new weights and random choices.
        share: neurons to add, as a share of the first size.
        share_of: unit of ``share``: ``parameters`` or ``neurons``.
        noise: standard deviation of noise on the gate rows of copied experts.
        layers: new number of layers of a language model; None: unchanged.
    """

    num_new: int
    method: str
    select: str
    seed: int
    share: float = 0.0
    share_of: str = "parameters"
    noise: float = 0.0
    layers: Optional[int] = None


@dataclass(frozen=True)
class Training:
    """One model to train in a stage.

    Attributes:
        model: identifier of the result.
        seed: of its initial weights, order of data and dropout.
        start: model whose weights it starts from; None: random weights.
        growth: applied to these weights before the training; None: no growth.
        num_experts: experts of each Switch layer of a model with random weights; None: as the user sets it.
        num_layers: layers of the language model; None: as the user sets it.
        num_joint: models that are trained jointly as this one.
        joint_logits: how their logits are combined: ``mean`` or ``sum``.
        bootstrap: train on a sample of the stage's examples, drawn with replacement.
    """

    model: ModelId
    seed: int
    start: Optional[ModelId] = None
    growth: Optional[Growth] = None
    num_experts: Optional[int] = None
    num_layers: Optional[int] = None
    num_joint: int = 1
    joint_logits: str = "mean"
    bootstrap: bool = False


@dataclass(frozen=True)
class StagePlan:
    """The work of a stage.

    Attributes:
        stage: its data.
        trainings: models to train, independent of each other.
        predictors: models that predict after the stage; they may be models of earlier stages.
        combine: how they predict: ``single`` for one model, else ``probabilities`` (mean), ``logits`` (mean) or
            ``vote``.
    """

    stage: Stage
    trainings: tuple[Training, ...]
    predictors: tuple[ModelId, ...]
    combine: str = "single"


LEARNERS: dict[str, dict[str, "type[Learner]"]] = {kind: {} for kind in KINDS}
"""Kind of data -> name of a learner (``--learner``) -> its class."""
Class = TypeVar("Class", bound="type[Learner]")


def register_learner(name: str, *kinds: str) -> Callable[[Class], Class]:
    """Register a class as ``--learner NAME`` for some kinds of data (default: all).

    Raises:
        ValueError: the name is taken, or a kind is unknown.
    """

    def register(learner: Class) -> Class:
        for kind in kinds or KINDS:
            if kind not in KINDS:
                raise ValueError(f"learner {name}: no streams of {kind}; choose from {', '.join(KINDS)}")
            if LEARNERS[kind].get(name, learner) is not learner:
                raise ValueError(f"learner {name}: registered already, by {LEARNERS[kind][name].__module__}")
            LEARNERS[kind][name] = learner
        learner.name = name
        return learner

    return register


Last = Callable[[str], Optional[tuple[str, ...]]]
"""Returns the values of the last occurrence of an option after ``--``; None if it is not given."""


@dataclass(frozen=True)
class Learner(Options):
    """Decides which models each stage trains, and which models predict after it.

    Attributes:
        name: value of ``--learner``.
        label: name in reports; None: ``name``.
        owned: options of fairseq-train that the learner decides -> how a user sets them instead.
        arch_prefix: image models: required prefix of the architecture's name; None: any.
        image_architectures: default architecture for drawings such as MNIST's, and for photographs.
        train_defaults: image models: defaults of training options.
        has_iid_control: whether ``--iid`` applies; a model that grows has no such control.
        trains_members_alone: whether members may be trained separately (``--member``, ``--jobs``).
        stacks_seeds: image models: whether models of several seeds may be trained in one network.
        seed: of the run, 0 to `MAX_SEED`.
        wait: waiting time, mega-batches.
        init: start each stage from the weights of the stage before (``previous``) or from random ones (``scratch``).
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
        "weights a stage starts from (default: previous; gens: scratch)",
        choices=("previous", "scratch"),
    )

    def check(self) -> None:
        """Raise ValueError, which begins with the option, if options contradict each other."""

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Raise ValueError if the options do not fit these stages."""

    def check_model(self, last: Last) -> None:
        """Raise ValueError if the options do not fit the model of the options after ``--``."""

    def plan(self, stage: Stage) -> StagePlan:
        """Plan one stage, from its data and the options alone."""
        raise NotImplementedError

    def starts_from(self, stage: Stage, member: int) -> Optional[ModelId]:
        """Return the same member of the stage before; None for random weights."""
        return ModelId(stage.index - 1, member) if self.init == "previous" and stage.index > 0 else None

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options of a kind of data for run.json, including those that are None."""
        return self.recorded(kind)

    def train_each(self, stage: Stage, num_members: int, combine: str = "probabilities", **training: Any) -> StagePlan:
        """Plan to train all members in the stage, each from its own weights of the stage before or from random ones.

        Args:
            stage: the data.
            num_members: number of models.
            combine: how several models predict, see `StagePlan`.
            training: further attributes of each `Training`.
        """
        models = tuple(ModelId(stage.index, member) for member in range(num_members))
        trainings = tuple(
            Training(model, member_seed(self.seed, model.member), self.starts_from(stage, model.member), **training)
            for model in models
        )
        return StagePlan(stage, trainings, models, combined(models, combine))


@dataclass(frozen=True)
class GrowingModel(Learner):
    """One model that grows before stages; a subclass defines the growth."""

    has_iid_control: ClassVar[bool] = False

    def check(self) -> None:
        if self.init != "previous":
            raise ValueError(
                f"--init {self.init}: --learner {self.name} grows the model of the stage before; remove --init, or use "
                "--learner sm"
            )

    def plan(self, stage: Stage) -> StagePlan:
        """Grow the model of the stage before, and train all of it."""
        model, seed = ModelId(stage.index, 0), member_seed(self.seed, 0)
        if stage.index == 0:
            return StagePlan(stage, (Training(model, seed, num_experts=self.first_num_experts),), (model,))
        # Each growth step has its own seed, so that no two steps draw the same weights.
        growth = self.growth_before(stage, self.seed + stage.index)
        return StagePlan(stage, (Training(model, seed, ModelId(stage.index - 1, 0), growth),), (model,))

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model; None: as the user sets it."""
        return None

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Return the growth before a stage that is not the first; None: no growth."""
        raise NotImplementedError


def combined(models: Sequence[ModelId], combine: str) -> str:
    """Return the rule by which some models predict, see `StagePlan`."""
    return "single" if len(models) == 1 else combine


def build_learner(learner: "type[Learner]", kind: str, seed: int, wait: int, given: Mapping[str, Any]) -> Learner:
    """Build a learner; ``given`` has the values of its options, as words or numbers.

    Raises:
        ValueError: an option is out of range, or options contradict each other; the message begins with the option.
    """
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
    """One model with a fixed number of experts in its layers (paper v1, section 5)."""

    label: ClassVar[Optional[str]] = "MoE"
    stacks_seeds: ClassVar[bool] = False
    arch_prefix: ClassVar[Optional[str]] = "alma_moe"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_moe_mlp", "alma_moe_vgg")
    train_defaults: ClassVar[Mapping[str, str]] = {"--num-experts": "4"}  # the paper does not state the number
