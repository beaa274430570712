"""What every learner is: its options with their defaults, the kinds of data it serves, and a plan for each stage.

A learner is one class: a frozen dataclass under `register_learner`, whose fields made by `opt` are its options.
``alma-stream`` reads all it needs to know of a learner from the class; its name stands nowhere else.
Source: sections 4.1 and 4.2 of the paper.
"""

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence, TypeVar

from fairseq_alma.learners.plan import Growth, ModelId, Stage, StagePlan, Training, member_seed
from fairseq_alma.options import KINDS, Options, opt, options_of

MAX_SEED = 9_999_999
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


@dataclass(frozen=True)
class Learner(Options):
    """Decides what a stage trains and what predicts after it. The first line of a learner's docstring is its help.

    Attributes:
        name: of ``--learner``.
        label: in reports; None: the name.
        owned: options of fairseq-train that the learner decides -> how a user says it instead.
        arch_prefix: image models: how the architecture's name must begin; None: any.
        image_architectures: default architecture for drawings such as MNIST's, and for photographs.
        train_defaults: image models: options of the training with a default of this learner.
        trains_jointly: whether several models are trained as one.
        has_iid_control: whether one stage on the union of mega-batches is a control (``--iid``): not of what grows.
        trains_members_alone: whether members may be trained by themselves (``--member``, ``--jobs``).
        stacks_seeds: whether models of several seeds can be trained side by side: neither growth nor joint training
            ties them to each other (images).
        seed: of the run, 0 to 9,999,999.
        wait: the waiting time, mega-batches.
        seen: of a learner that looks back: training FLOPs of the stages so far, and the loss on valid after each.
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
    seen: tuple[tuple[float, float], ...] = ()
    init: str = opt(
        "previous",
        "begin each stage with the weights of the stage before, or with random ones: scratch",
        choices=("previous", "scratch"),
    )

    @property
    def looks_back(self) -> bool:
        """Whether a stage's plan depends on how those before it went."""
        return False

    def check(self) -> None:
        """Raise ValueError if the options do not go together; the message begins with the option."""

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Raise ValueError if the options do not fit these stages."""

    def plan(self, stage: Stage) -> StagePlan:
        """Plan one stage, from its data and the options alone."""
        raise NotImplementedError

    def starts_from(self, stage: Stage, member: int) -> Optional[ModelId]:
        """Return the same member of the stage before; None where a stage starts from random weights."""
        return ModelId(stage.index - 1, member) if self.init == "previous" and stage.index > 0 else None

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that have a meaning on streams of a kind, as run.json says them: also what is None."""
        return dict(self._recorded(kind))

    def train_each(self, stage: Stage, num_members: int, combine: str = "probabilities", **training: Any) -> StagePlan:
        """Plan models that each stage trains, each from its own weights of the stage before or from random ones.

        Args:
            stage: the data.
            num_members: how many.
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
    """One model that grows before stages; a subclass says by what, in `growth_before`."""

    has_iid_control: ClassVar[bool] = False

    def check(self) -> None:
        """Growth needs a model that it can grow."""
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
        """Experts of the first stage's model; None: the user says."""
        return None

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Return what is added before a stage that is not the first; None: nothing."""
        raise NotImplementedError


def is_growth_due(stage: Stage, wait: int, grow_every: int) -> bool:
    """Tell whether a multiple of ``grow_every`` has been reached since the stage before, counted in first arrivals.

    With waiting time 10 and growth every 50 arrivals the model grows before stages 5, 10, …; with waiting time 100
    before each.
    """
    first = stage.arrivals[0]
    return first // grow_every > (first - wait) // grow_every


def combined(models: Sequence[ModelId], combine: str) -> str:
    """Return how models predict: a single one by itself."""
    return "single" if len(models) == 1 else combine


def plan_stages(learner: Learner, planned: Sequence[Stage]) -> list[StagePlan]:
    """Plan a whole stream.

    Args:
        learner: who decides.
        planned: the stages.

    Raises:
        ValueError: the options do not fit these stages; the message begins with the option.
    """
    learner.check_stages(planned)
    return [learner.plan(stage) for stage in planned]


def build_learner(learner: "type[Learner]", kind: str, seed: int, wait: int, given: Mapping[str, Any]) -> Learner:
    """Make a learner of options as words and numbers.

    Args:
        learner: the class.
        kind: of data.
        seed: of the run.
        wait: the waiting time, mega-batches.
        given: values of its options, where the user gave any.

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
