"""Learners that combine predictions of several models, trained separately (Ens, Bagging, gEns) or jointly (UMix)."""

from dataclasses import dataclass
from typing import ClassVar, Mapping, Optional

from fairseq_alma.learners.learner import (
    MAX_MEMBERS,
    Learner,
    ModelId,
    Stage,
    StagePlan,
    Training,
    member_seed,
    register_learner,
)
from fairseq_alma.options import integer, opt

NUM_MEMBERS = {"text": 2, "images": 5}  # default by kind of data (paper: Table 2; v5, Appendix B.1)
MEMBERS_HELP = "number of members (default: 2 for text, 5 for images); for gens: new members in each stage (default: 1)"
MEMBERS_RANGE = integer(1, MAX_MEMBERS)


@register_learner("ens")
@dataclass(frozen=True)
class Ensemble(Learner):
    """Ensemble of N models that are trained separately with different seeds and predict together."""

    label: ClassVar[Optional[str]] = "Ens"
    bootstrap: ClassVar[bool] = False
    trains_members_alone: ClassVar[bool] = True
    stacks_seeds: ClassVar[bool] = True

    num_members: int = opt(None, MEMBERS_HELP, range=MEMBERS_RANGE, defaults=NUM_MEMBERS)
    combine: str = opt(
        "probabilities",
        "how predictions are combined: mean of probabilities, majority vote, or mean of logits",
        choices=("probabilities", "vote", "logits"),
        kinds=("images",),
    )

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, self.num_members, self.combine, bootstrap=self.bootstrap)


@register_learner("bagging", "images")
@dataclass(frozen=True)
class Bagging(Ensemble):
    """Ensemble in which each member trains on a separate bootstrap sample of the stage's images (Breiman 1996)."""

    label: ClassVar[Optional[str]] = "Bagging"
    bootstrap: ClassVar[bool] = True


@register_learner("gens")
@dataclass(frozen=True)
class GrowingEnsemble(Ensemble):
    """Ensemble to which each stage adds N models, trained on the stage's data. Earlier models are frozen.

    The paper's text does not state the initial weights of a new model; the paper's released code copies the last model.
    """

    label: ClassVar[Optional[str]] = "gEns"
    has_iid_control: ClassVar[bool] = False

    init: str = opt(
        "scratch",
        "initial weights of a new model: weights of the last model, or random weights",
        choices=("previous", "scratch"),
    )
    num_members: int = opt(1, MEMBERS_HELP, range=MEMBERS_RANGE)

    def plan(self, stage: Stage) -> StagePlan:
        num_new = self.num_members
        last = self.starts_from(stage, stage.index * num_new - 1)
        models = tuple(ModelId(member // num_new, member) for member in range((stage.index + 1) * num_new))
        trainings = tuple(Training(each, member_seed(self.seed, each.member), last) for each in models[-num_new:])
        return StagePlan(stage, trainings, models, self.combine)


@register_learner("umix", "images")
@dataclass(frozen=True)
class UniformMixture(Learner):
    """N models trained jointly, on the mean (paper's text) or the sum (paper's released code) of their logits."""

    label: ClassVar[Optional[str]] = "UMix"
    owned: ClassVar[Mapping[str, str]] = {
        "--num-members": "give --num-members before the --",
        "--member-arch": "give the members' architecture as --arch",
        "--member-options": "give the options of the members' architecture directly after --",
    }

    num_members: int = opt(None, MEMBERS_HELP, range=MEMBERS_RANGE, defaults=NUM_MEMBERS)
    joint_logits: str = opt(
        "mean",
        "how the members' logits are combined in training and prediction",
        choices=("mean", "sum"),
        kinds=("images",),
    )

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, num_members=1, num_joint=self.num_members, joint_logits=self.joint_logits)
