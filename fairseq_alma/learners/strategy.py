"""The learners. Each one turns a stage into a plan; a new learner is a class here and one line of `LEARNERS`.

Source: sections 4.1 and 4.2 of the paper.
"""

from dataclasses import dataclass
from typing import Mapping, Optional, Protocol, Sequence

from fairseq_alma.learners.plan import Growth, Model, StagePlan, Training, member_seed
from fairseq_alma.learners.schedule import Stage


@dataclass(frozen=True)
class LearnerOptions:
    """What learners are told; each uses what it has a use for.

    Attributes:
        seed: of the run.
        from_previous: start each stage from the weights of the one before, rather than from scratch.
        num_members: models that predict together; for gEns those that each stage adds.
        grow_schedule: experts in each Switch layer during stage 0, 1, …; for learners that add experts.
        grow_method: how experts are added, see `plan.Growth`.
        grow_select: which experts are copied or split.
        wait: the waiting time; for learners that grow every so many arrivals.
        grow_every: arrivals between two growth steps; for learners without a schedule.
        grow_share: share of the first size that each growth step adds; for learners that add neurons.
        combine: how several models predict: ``probabilities`` or ``vote``.
    """

    seed: int
    from_previous: bool = True
    num_members: int = 1
    grow_schedule: tuple[int, ...] = ()
    grow_method: str = "copy"
    grow_select: str = "loss"
    wait: int = 1
    grow_every: int = 1
    grow_share: float = 0.0
    combine: str = "probabilities"


class Learner(Protocol):
    """Decides what a stage trains and what predicts after it.

    Attributes:
        owned: options of fairseq-train that the learner decides, and how a user says it instead.
        default_members: value of ``num_members`` where the user gives none; None: the learner has no members.
    """

    owned: Mapping[str, str]
    default_members: Optional[int]

    def __init__(self, options: LearnerOptions) -> None: ...

    def plan(self, stage: Stage) -> StagePlan:
        """Plan one stage, from its data and the options alone."""


class SingleModel:
    """SM (FT in the paper's first version): one model, fine-tuned stage after stage."""

    owned: Mapping[str, str] = {}
    default_members: Optional[int] = None

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Train the one model of the stage before, or a new one."""
        return _independent(stage, self.options, num_members=1)


class Ensemble:
    """Ens: N models that differ by their seeds, each fine-tuned on its own; the mean of their probabilities."""

    owned: Mapping[str, str] = {}
    default_members: Optional[int] = 2

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Train every member of the stage before, or new ones."""
        return _independent(stage, self.options, self.options.num_members)


class GrowingEnsemble:
    """gEns: each stage adds n models trained on its data alone; all before stay as they are, and predict too."""

    owned: Mapping[str, str] = {}
    default_members: Optional[int] = 1

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Train n new models, from scratch as in the paper, or from the last one of the stage before."""
        num_new = self.options.num_members
        last: Optional[Model] = None
        if self.options.from_previous and stage.index > 0:
            last = Model(stage.index - 1, stage.index * num_new - 1)
        everyone = [Model(member // num_new, member) for member in range((stage.index + 1) * num_new)]
        trainings = [
            Training(model, member_seed(self.options.seed, model.member), last) for model in everyone[-num_new:]
        ]
        return StagePlan(stage, tuple(trainings), tuple(everyone), _combination(everyone, self.options))


class GrowingMixture:
    """gMoE: one Switch model that gets more experts between the stages."""

    owned: Mapping[str, str] = {
        "--num-experts": "give --grow-schedule before the --",
        "--gate-trees": "alma-grow decides the gates; give --grow-method before the --",
    }
    default_members: Optional[int] = None

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Grow the model of the stage before to the schedule's size, and train all of it."""
        schedule, index = self.options.grow_schedule, stage.index
        model, seed = Model(index, 0), member_seed(self.options.seed, 0)
        if index == 0:
            return StagePlan(stage, (Training(model, seed, num_experts=schedule[0]),), (model,))
        growth: Optional[Growth] = None
        num_new = schedule[index] - schedule[index - 1]
        if num_new > 0:
            # The seed moves with the stage, so that no two growth steps draw the same new weights.
            growth = Growth(num_new, self.options.grow_method, self.options.grow_select, self.options.seed + index)
        return StagePlan(stage, (Training(model, seed, Model(index - 1, 0), growth),), (model,))


class UniformMixture:
    """UMix: N models trained jointly, as one, on the mean of their logits."""

    owned: Mapping[str, str] = {
        "--num-members": "give --num-members before the --",
        "--member-arch": "give the members' architecture as --arch",
        "--member-options": "give the members' options as those of a single model",
    }
    default_members: Optional[int] = 2

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Train the one joint model of the stage before, or a new one."""
        return _independent(stage, self.options, num_members=1, num_joint=self.options.num_members)


LEARNERS: dict[str, type[Learner]] = {
    "sm": SingleModel,
    "ens": Ensemble,
    "gens": GrowingEnsemble,
    "gmoe": GrowingMixture,
    "umix": UniformMixture,
}


def plan_stages(
    learner: str,
    options: LearnerOptions,
    stages: Sequence[Stage],
    learners: Mapping[str, type[Learner]] = LEARNERS,
) -> list[StagePlan]:
    """Plan a whole stream for the learner of that name."""
    strategy = learners[learner](options)
    return [strategy.plan(stage) for stage in stages]


def _independent(stage: Stage, options: LearnerOptions, num_members: int, num_joint: int = 1) -> StagePlan:
    """Plan models that are trained in every stage, each from its own weights of the stage before or from scratch."""
    goes_on = options.from_previous and stage.index > 0
    models = [Model(stage.index, member) for member in range(num_members)]
    trainings = [
        Training(
            model,
            member_seed(options.seed, model.member),
            Model(stage.index - 1, model.member) if goes_on else None,
            num_joint=num_joint,
        )
        for model in models
    ]
    return StagePlan(stage, tuple(trainings), tuple(models), _combination(models, options))


def _combination(models: Sequence[Model], options: LearnerOptions) -> str:
    return "single" if len(models) == 1 else options.combine
