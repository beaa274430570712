"""Learners of several models that predict together, trained separately (Ens, Bagging, gEns) or jointly (UMix)."""

from dataclasses import dataclass
from typing import ClassVar, Mapping, Optional

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
"""Members in Table 2 of the paper, and in its image study (v5, Appendix B.1)."""
MEMBERS_HELP = "members (default: text 2, images 5; gens: 1 in each stage)"
MEMBERS_RANGE = integer(1, MAX_MEMBERS)


@register_learner("ens")
@dataclass(frozen=True)
class Ensemble(Learner):
    """N models with N seeds, trained separately; the mean of their probabilities predicts."""

    label: ClassVar[Optional[str]] = "Ens"
    trains_members_alone: ClassVar[bool] = True
    stacks_seeds: ClassVar[bool] = True

    num_members: int = opt(None, MEMBERS_HELP, range=MEMBERS_RANGE, defaults=NUM_MEMBERS)
    combine: str = opt(
        "probabilities",
        "joint prediction",
        choices=("probabilities", "vote", "logits"),
        kinds=("images",),
    )

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, self.num_members, self.combine)


@register_learner("bagging", "images")
@dataclass(frozen=True)
class Bagging(Ensemble):
    """An ensemble whose members each train on a bootstrap sample of a stage's images (Breiman 1996)."""

    label: ClassVar[Optional[str]] = "Bagging"

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, self.num_members, self.combine, bootstrap=True)


@register_learner("gens")
@dataclass(frozen=True)
class GrowingEnsemble(Ensemble):
    """N new models in each stage, trained on its data only; the earlier models stay unchanged and predict too.

    The paper's text does not state the initial weights of a new model; its released code starts from the last one.
    """

    label: ClassVar[Optional[str]] = "gEns"
    has_iid_control: ClassVar[bool] = False

    init: str = opt(
        "scratch",
        "weights a new model starts from",
        choices=("previous", "scratch", "fresh"),
        parse=lambda word: "scratch" if word == "fresh" else word,
    )
    num_members: int = opt(1, MEMBERS_HELP, range=MEMBERS_RANGE)

    def plan(self, stage: Stage) -> StagePlan:
        num_new = self.num_members
        last = self.starts_from(stage, stage.index * num_new - 1)
        models = tuple(ModelId(member // num_new, member) for member in range((stage.index + 1) * num_new))
        trainings = tuple(Training(each, member_seed(self.seed, each.member), last) for each in models[-num_new:])
        return StagePlan(stage, trainings, models, combined(models, self.combine))


@register_learner("umix", "images")
@dataclass(frozen=True)
class UniformMixture(Learner):
    """N models trained jointly, on the mean (the paper's text) or the sum (its released code) of their logits."""

    label: ClassVar[Optional[str]] = "UMix"
    owned: ClassVar[Mapping[str, str]] = {
        "--num-members": "give --num-members before the --",
        "--member-arch": "give the members' architecture as --arch",
        "--member-options": "give the members' options as those of a single model",
    }

    num_members: int = opt(None, MEMBERS_HELP, range=MEMBERS_RANGE, defaults=NUM_MEMBERS)
    joint_logits: str = opt(
        "mean", "mean or sum of the members' logits", choices=("mean", "sum"), quiet=True, kinds=("images",)
    )

    def plan(self, stage: Stage) -> StagePlan:
        return self.train_each(stage, num_members=1, num_joint=self.num_members, joint_logits=self.joint_logits)
