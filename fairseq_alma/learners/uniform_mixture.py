"""UMix: N models trained jointly, as one, on the mean of their logits."""

from dataclasses import dataclass
from typing import ClassVar, Mapping, Optional

from fairseq_alma.learners.ensemble import num_members_option
from fairseq_alma.learners.learner import Learner, register_learner
from fairseq_alma.learners.plan import Stage, StagePlan
from fairseq_alma.options import opt


@register_learner("umix")
@dataclass(frozen=True)
class UniformMixture(Learner):
    """N models trained jointly as one, on the mean of their logits (images: or the sum)."""

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
