"""The base of every learner: options with their defaults, the kinds of data it serves, and a plan for each stage.

Which mega-batches a stage trains on is the arithmetic of the paper's Algorithm 1. A plan is data, which the loop and
the back ends carry out. It is known before anything runs, so that ``--dry-run`` can print it, a queue can run one stage
alone, and files that no later stage needs can be removed.

A learner is one class: a frozen dataclass under `register_learner`, whose fields made by `opt` are its options.
``alma-stream`` reads all it needs to know of a learner from the class; its name is nowhere else in the package.
Source: sections 4.1 and 4.2 of the paper.
"""

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence, TypeVar

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import KINDS, Options, integer, opt, options_of


@dataclass(frozen=True)
class StageOptions(Options):
    """Which stage of a stream a task of fairseq's trains on."""

    megabatch: Optional[int] = opt(
        None, "train on the stage that ends with this mega-batch, from 0", range=integer(0, MAX_MEGABATCHES - 1)
    )
    wait: int = opt(1, "waiting time: mega-batches that are gathered for one stage", range=integer(1))
    replay: bool = opt(False, "train on all mega-batches up to this one")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Which stages a run has."""

    wait: int = opt(1, "mega-batches gathered before an update", range=integer(1), metavar="W")
    replay: bool = opt(False, "train on all mega-batches so far, not on the new ones alone")
    drop_rest: bool = opt(False, "drop the last mega-batches if fewer than W remain")
    iid: Optional[int] = opt(
        None,
        "control: one stage on the shuffled union of the first K mega-batches, with K times the updates",
        range=integer(1),
        trait="has_iid_control",
        metavar="K",
    )
    first_wait: Optional[int] = opt(
        None, "mega-batches gathered before the first update (default: W)", range=integer(1), metavar="K", quiet=True
    )
    passes_of_new: bool = opt(
        False, "with --replay: --passes counts passes over the new mega-batches; updates are drawn from all", quiet=True
    )


@dataclass(frozen=True)
class Stage:
    """One update of the model.

    Attributes:
        index: number of the stage, from 0.
        arrivals: the mega-batches that were gathered since the last stage, in order; the stage runs when the last of
            them is there.
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
        wait: w, the number of mega-batches that are gathered before an update, at least 1.
        replay: train on everything that has arrived, not on the new mega-batches alone.
        drop_rest: drop the last ``B mod w`` mega-batches (Table 2's w3 rows) rather than train on them as a last,
            shorter stage.
        first_wait: waiting time before the first update; None: w.

    Returns:
        The stages in order: for B = 4 and w = 3, mega-batches 0-2 and then 3 alone. Empty if w > B and the rest is
        dropped.
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
    """Return the stage that starts when a mega-batch (from 0) arrives; arguments as those of `stages`.

    Raises:
        AlmaError: if no stage ends with this mega-batch, because a learner that waits is still waiting then.
    """
    planned = {stage.last_arrival: stage for stage in stages(num_megabatches, wait, replay)}
    if megabatch not in planned:
        ends = ", ".join(str(end) for end in planned)
        raise AlmaError(f"--megabatch {megabatch} --wait {wait}: no stage ends there; give one of {ends}")
    return planned[megabatch]


MAX_SEED = 9_999_999
MAX_MEMBERS = 200
"""Of those that one stage trains."""
MEMBER_SEED_STEP, _STEPS_OF_SEEDS = 10_000_000, 400
"""Between the seeds of members: more than a stage has updates; as many as there are below 2**32, NumPy's largest."""


def member_seed(seed: int, member: int) -> int:
    """Return the seed of a member of a run; member 0 has the run's own seed: it is the single model of the same seed.

    Fairseq seeds update u with ``seed + u`` and epoch e with ``seed + e``, so that seeds of two members must lie
    further apart than a stage has updates: 10,000,000 of the first 400, half of that of the next 400, a quarter, ….

    Args:
        seed: of the run, 0 to `MAX_SEED`.
        member: number of the member over the whole run.
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
    """What is added to a model between two stages.

    Attributes:
        num_new: experts to add to each layer that has experts.
        method: ``copy``, ``split`` or ``scratch``; ``firefly``: neurons rather than experts.
        select: which experts are copied or split: ``loss``, ``usage`` or ``random``.
        seed: of new weights and random choices.
        share: of the first size that is added as neurons.
        share_of: what ``share`` counts: ``parameters`` or ``neurons``.
        noise: copies of experts: standard deviation of the noise on their gate rows.
        layers: that a language model is to have; None: those it has.
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
        model: the name of the result.
        seed: of its initial weights, order of data and dropout.
        start: the model whose weights it starts from; None: random ones.
        growth: what is done to these weights first; None: nothing.
        num_experts: experts in each Switch layer of a model that starts from random weights; None: as the user sets it.
        num_layers: of the language model that is trained; None: as the user sets it.
        num_joint: models that are trained jointly as this one.
        joint_logits: what these are trained on and predict with: the ``mean`` or the ``sum`` of their logits.
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
    """Everything that happens in a stage.

    Attributes:
        stage: the data.
        trainings: models to train, independent of each other.
        predictors: models that predict afterwards; those that are not trained in this stage stay unchanged.
        combine: how their predictions become one: ``single`` for one model, else ``probabilities`` (mean), ``logits``
            (mean) or ``vote``.
    """

    stage: Stage
    trainings: tuple[Training, ...]
    predictors: tuple[ModelId, ...]
    combine: str = "single"


LEARNERS: dict[str, dict[str, "type[Learner]"]] = {kind: {} for kind in KINDS}
"""The learners of each kind of data, by the names that ``--learner`` takes."""
Class = TypeVar("Class", bound="type[Learner]")


def register_learner(name: str, *kinds: str) -> Callable[[Class], Class]:
    """Make a class known as ``--learner NAME`` on streams of these kinds (default: all).

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
"""Returns the values of an option after ``--``, of its last occurrence; None: it is not given."""


@dataclass(frozen=True)
class Learner(Options):
    """Decides what a stage trains and what predicts after it. The first line of a learner's docstring is its help.

    Attributes:
        name: of ``--learner``.
        label: in reports; None: the name.
        owned: options of fairseq-train that the learner decides -> how a user gives them instead.
        arch_prefix: image models: how the architecture's name must begin; None: any.
        image_architectures: default architecture for drawings such as MNIST's, and for photographs.
        train_defaults: image models: options of the training with a default of this learner.
        trains_jointly: whether several models are trained as one.
        has_iid_control: whether one stage on the union of mega-batches is a control (``--iid``): not of what grows.
        trains_members_alone: whether members may be trained by themselves (``--member``, ``--jobs``).
        stacks_seeds: whether models of several seeds can be trained side by side (images): nothing ties them together.
        seed: of the run, 0 to `MAX_SEED`.
        wait: the waiting time, mega-batches.
        init: begin each stage with the weights of the stage before (``previous``) or with random ones (``scratch``).
    """

    name: ClassVar[str]
    label: ClassVar[Optional[str]] = None
    owned: ClassVar[Mapping[str, str]] = {}
    arch_prefix: ClassVar[Optional[str]] = None
    image_architectures: ClassVar[tuple[str, str]] = ("alma_mlp", "alma_vgg")
    train_defaults: ClassVar[Mapping[str, str]] = {}
    trains_jointly: ClassVar[bool] = False
    has_iid_control: ClassVar[bool] = True
    trains_members_alone: ClassVar[bool] = False
    stacks_seeds: ClassVar[bool] = False

    seed: int
    wait: int = 1
    init: str = opt(
        "previous",
        "begin each stage with the weights of the stage before, or with random ones: scratch",
        choices=("previous", "scratch"),
    )

    def check(self) -> None:
        """Raise ValueError if the options do not go together; the message begins with the option."""

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Raise ValueError if the options do not fit these stages."""

    def check_model(self, last: Last) -> None:
        """Raise ValueError if a model of the options after ``--`` cannot be trained so."""

    def plan(self, stage: Stage) -> StagePlan:
        """Plan one stage, from its data and the options alone."""
        raise NotImplementedError

    def starts_from(self, stage: Stage, member: int) -> Optional[ModelId]:
        """Return the same member of the stage before; None where a stage starts from random weights."""
        return ModelId(stage.index - 1, member) if self.init == "previous" and stage.index > 0 else None

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that have a meaning on streams of a kind, as in run.json: also those that are None."""
        return dict(self._recorded(kind))

    def train_each(self, stage: Stage, num_members: int, combine: str = "probabilities", **training: Any) -> StagePlan:
        """Plan models that each stage trains, each from its own weights of the stage before or from random ones.

        Args:
            stage: the data.
            num_members: of models.
            combine: how several predict, see `StagePlan`.
            training: further attributes of each `Training`.
        """
        models = [ModelId(stage.index, member) for member in range(num_members)]
        trainings = [
            Training(model, member_seed(self.seed, model.member), self.starts_from(stage, model.member), **training)
            for model in models
        ]
        return StagePlan(stage, tuple(trainings), tuple(models), combined(models, combine))


@dataclass(frozen=True)
class GrowingModel(Learner):
    """One model that grows before stages; a subclass decides by what, in `growth_before`."""

    has_iid_control: ClassVar[bool] = False

    def check(self) -> None:
        """Refuse ``--init scratch``: growth needs a model."""
        if self.init != "previous":
            raise ValueError(
                f"--init {self.init}: {self.name} grows the model of the stage before; use --learner sm, or "
                "--init previous"
            )

    def plan(self, stage: Stage) -> StagePlan:
        """Grow the model of the stage before, where growth is due, and train all of it."""
        model, seed = ModelId(stage.index, 0), member_seed(self.seed, 0)
        if stage.index == 0:
            return StagePlan(stage, (Training(model, seed, num_experts=self.first_num_experts),), (model,))
        # The seed of growth moves with the stage, so that no two growth steps draw the same new weights.
        growth = self.growth_before(stage, self.seed + stage.index)
        return StagePlan(stage, (Training(model, seed, ModelId(stage.index - 1, 0), growth),), (model,))

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model; None: as the user sets it."""
        return None

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Return what is added before a stage that is not the first; None: nothing."""
        raise NotImplementedError


def is_growth_due(stage: Stage, wait: int, grow_every: int) -> bool:
    """Return whether a multiple of ``grow_every`` has been reached since the stage before, in first arrivals.

    With waiting time 10 and growth every 50 arrivals the model grows before stages 5, 10, …; with waiting time 100
    before each.
    """
    first = stage.arrivals[0]
    return first // grow_every > (first - wait) // grow_every


def combined(models: Sequence[ModelId], combine: str) -> str:
    """Return how models predict: a single one by itself."""
    return "single" if len(models) == 1 else combine


def plan_stages(learner: Learner, planned: Sequence[Stage]) -> list[StagePlan]:
    """Plan a stream. Raises ValueError if the options do not fit these stages; it begins with the option."""
    learner.check_stages(planned)
    return [learner.plan(stage) for stage in planned]


def build_learner(learner: "type[Learner]", kind: str, seed: int, wait: int, given: Mapping[str, Any]) -> Learner:
    """Make a learner; ``given`` has the options that the user gave, as words and numbers.

    Raises:
        ValueError: a value is out of range, or options do not go together; the message begins with the option.
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
    """One model, trained on stage after stage."""

    label: ClassVar[Optional[str]] = "SM"
    stacks_seeds: ClassVar[bool] = True

    def plan(self, stage: Stage) -> StagePlan:
        """Train the one model of the stage before, or a new one."""
        return self.train_each(stage, num_members=1)


@register_learner("moe", "images")
@dataclass(frozen=True)
class FixedMixture(SingleModel):
    """One model with a fixed number of experts in its layers (paper v1, section 5)."""

    label: ClassVar[Optional[str]] = "MoE"
    stacks_seeds: ClassVar[bool] = False
    arch_prefix: ClassVar[Optional[str]] = "alma_moe"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_moe_mlp", "alma_moe_vgg")
    train_defaults: ClassVar[Mapping[str, str]] = {"--num-experts": "4"}  # the paper leaves the number open
