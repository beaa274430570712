"""gEns: an ensemble that gets new members in each stage; all before stay as they are, and predict too."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from fairseq_alma.learners.ensemble import combine_option, num_members_option
from fairseq_alma.learners.learner import Learner, combined, register_learner
from fairseq_alma.learners.plan import ModelId, Stage, StagePlan, Training, member_seed
from fairseq_alma.options import opt


@register_learner("gens")
@dataclass(frozen=True)
class GrowingEnsemble(Learner):
    """N new models in each stage, trained on its data alone; the others stay as they are, and predict too."""

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
        """Train n new models, from scratch, or from the last one of the stage before: the paper's text does not say."""
        num_new = self.num_members
        last = self.starts_from(stage, stage.index * num_new - 1)
        everyone = [ModelId(member // num_new, member) for member in range((stage.index + 1) * num_new)]
        trainings = [Training(model, member_seed(self.seed, model.member), last) for model in everyone[-num_new:]]
        combine = combined(everyone, self.combine)
        return StagePlan(stage, tuple(trainings), tuple(everyone), combine)
