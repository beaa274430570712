"""A learner from outside the package, for ``alma-stream --learners-from``: one class, nothing else."""

from dataclasses import dataclass, replace

from fairseq_alma.learners.learner import Learner, register_learner
from fairseq_alma.options import integer, opt


@register_learner("reset")
@dataclass(frozen=True)
class ResettingModel(Learner):
    """One model that begins with random weights again in every n-th stage."""

    reset_every: int = opt(2, "stages from one beginning to the next", range=integer(1))

    def plan(self, stage):
        plan = self.train_each(stage, num_members=1)
        begins = stage.index % self.reset_every == 0
        return replace(plan, trainings=tuple(replace(each, start=None) for each in plan.trainings)) if begins else plan
