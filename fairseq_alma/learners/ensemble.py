"""Several models that predict together: trained each on its own (Ens, bagging, gEns), or jointly (UMix)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, Optional

from fairseq_alma.learners.learner import (
    MAX_MEMBERS,
    Learner,
    ModelId,
    Stage,
    StagePlan,
    Training,
    combined,
    member_seed,
    register_learner,
)
from fairseq_alma.options import integer, opt

NUM_MEMBERS = {"text": 2, "images": 5}
"""Models that predict together: Table 2 of the paper, and its image study (v5, Appendix B.1)."""


def num_members_option(help: str, default: Optional[int] = None) -> Any:
    """Declare ``--num-members``."""
    return opt(default, help, range=integer(1, MAX_MEMBERS), defaults=NUM_MEMBERS if default is None else {})


def combine_option() -> Any:
    """Declare ``--combine``; language models predict by the mean of probabilities."""
    return opt(
        "probabilities",
        "predict with the mean of the members' probabilities, with what most of them find (vote), or with the mean of "
        "their logits, as gEns in the paper's released code",
        choices=("probabilities", "vote", "logits"),
        kinds=("images",),
    )


@register_learner("ens")
@dataclass(frozen=True)
class Ensemble(Learner):
    """N models with N seeds, each trained on its own; the mean of their probabilities predicts."""

    label: ClassVar[Optional[str]] = "Ens"
    trains_members_alone: ClassVar[bool] = True
    stacks_seeds: ClassVar[bool] = True

    num_members: int = num_members_option("models that predict together")
    combine: str = combine_option()

    def plan(self, stage: Stage) -> StagePlan:
        """Train every member of the stage before, or new ones."""
        return self.train_each(stage, self.num_members, self.combine)


@register_learner("bagging", "images")
@dataclass(frozen=True)
class Bagging(Ensemble):
    """An ensemble whose members each draw a bootstrap sample of a stage's images (Breiman 1996)."""

    label: ClassVar[Optional[str]] = "Bagging"

    def plan(self, stage: Stage) -> StagePlan:
        """Plan as for an ensemble, each member with a sample of its own."""
        return self.train_each(stage, self.num_members, self.combine, bootstrap=True)


@register_learner("gens")
@dataclass(frozen=True)
class GrowingEnsemble(Learner):
    """N new models in each stage, trained on its data alone; the others stay unchanged, and predict too."""

    label: ClassVar[Optional[str]] = "gEns"
    has_iid_control: ClassVar[bool] = False
    trains_members_alone: ClassVar[bool] = True
    stacks_seeds: ClassVar[bool] = True

    init: str = opt(
        "scratch",
        "begin new models with random weights (scratch, or fresh), or with those of the last member (previous), as the "
        "paper's released code does; its text leaves it open",
        choices=("previous", "scratch", "fresh"),
        parse=lambda word: "scratch" if word == "fresh" else word,
    )
    num_members: int = num_members_option("new models in each stage", default=1)
    combine: str = combine_option()

    def plan(self, stage: Stage) -> StagePlan:
        """Train n new models, from scratch or from the last one of the stage before."""
        num_new = self.num_members
        last = self.starts_from(stage, stage.index * num_new - 1)
        everyone = [ModelId(member // num_new, member) for member in range((stage.index + 1) * num_new)]
        trainings = [Training(model, member_seed(self.seed, model.member), last) for model in everyone[-num_new:]]
        combine = combined(everyone, self.combine)
        return StagePlan(stage, tuple(trainings), tuple(everyone), combine)


@register_learner("umix", "images")
@dataclass(frozen=True)
class UniformMixture(Learner):
    """N models trained jointly as one, on the mean or the sum of their logits."""

    label: ClassVar[Optional[str]] = "UMix"
    trains_jointly: ClassVar[bool] = True
    owned: ClassVar[Mapping[str, str]] = {
        "--num-members": "give --num-members before the --",
        "--member-arch": "give the members' architecture as --arch",
        "--member-options": "give the members' options as those of a single model",
    }

    num_members: int = num_members_option("models that predict together")
    joint_logits: str = opt(
        "mean",
        "train and predict with the mean of the members' logits, as the paper's text has it, or with their sum, as its "
        "released code does",
        choices=("mean", "sum"),
        quiet=True,
        kinds=("images",),
    )

    def plan(self, stage: Stage) -> StagePlan:
        """Train the one joint model of the stage before, or a new one."""
        return self.train_each(stage, num_members=1, num_joint=self.num_members, joint_logits=self.joint_logits)
