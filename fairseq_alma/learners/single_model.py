"""SM, and MoE on images: one model, trained on stage after stage (FT in the paper's first version)."""

from dataclasses import dataclass
from typing import ClassVar, Mapping, Optional

from fairseq_alma.learners.learner import Learner, register_learner
from fairseq_alma.learners.plan import Stage, StagePlan


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
