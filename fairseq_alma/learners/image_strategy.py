"""Learners that only image streams have; see `strategy` for the others. Source: sections 4.1 and 4.2 of the paper."""

from dataclasses import replace
from typing import Mapping, Optional

from fairseq_alma.learners.plan import Growth, Model, StagePlan, Training, member_seed
from fairseq_alma.learners.schedule import Stage
from fairseq_alma.learners.strategy import (
    Ensemble,
    GrowingEnsemble,
    Learner,
    LearnerOptions,
    SingleModel,
    UniformMixture,
)

NUM_MEMBERS = 5  # of Ens, bagging and UMix in the image study (paper v5, Appendix B.1)


class FixedMixture(SingleModel):
    """MoE: one model with a fixed number of experts in its layers (paper v1, section 5)."""


class ImageEnsemble(Ensemble):
    """Ens with the five members of the image study."""

    default_members: Optional[int] = NUM_MEMBERS


class Bagging(ImageEnsemble):
    """Bagging: an ensemble whose members each draw a bootstrap sample of a stage's images (Breiman 1996)."""

    def plan(self, stage: Stage) -> StagePlan:
        """Plan as for an ensemble, each member with a sample of its own."""
        plan = super().plan(stage)
        return replace(plan, trainings=tuple(replace(training, bootstrap=True) for training in plan.trainings))


class ImageUniformMixture(UniformMixture):
    """UMix with the five members of the image study."""

    default_members: Optional[int] = NUM_MEMBERS


class _GrowingModel:
    """One model that grows before stages; a subclass says by what."""

    owned: Mapping[str, str] = {}
    default_members: Optional[int] = None
    method: str

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options

    def plan(self, stage: Stage) -> StagePlan:
        """Grow the model of the stage before, where growth is due, and train all of it."""
        model, seed = Model(stage.index, 0), member_seed(self.options.seed, 0)
        if stage.index == 0:
            return StagePlan(stage, (Training(model, seed),), (model,))
        growth: Optional[Growth] = None
        if self._is_due(stage):
            # The seed moves with the stage, so that no two growth steps draw the same new weights.
            growth = Growth(1, self.method, "loss", self.options.seed + stage.index, self.options.grow_share)
        return StagePlan(stage, (Training(model, seed, Model(stage.index - 1, 0), growth),), (model,))

    def _is_due(self, stage: Stage) -> bool:
        """Tell whether a multiple of ``grow_every`` has been reached since the stage before, counted in first arrivals.

        With waiting time 10 and growth every 50 arrivals the model grows before stages 5, 10, …; with waiting time 100
        before each.
        """
        first, wait = stage.arrivals[0], self.options.wait
        return first // self.options.grow_every > (first - wait) // self.options.grow_every


class TreeMixture(_GrowingModel):
    """gMoE: in each layer the expert with the largest validation loss becomes two, under a new gate (Appendix A)."""

    method = "split"


class Firefly(_GrowingModel):
    """FF: neurons are split and added by gradient score, a fixed share of the first size each time (Wu et al. 2020)."""

    method = "firefly"


IMAGE_LEARNERS: dict[str, type[Learner]] = {
    "sm": SingleModel,
    "moe": FixedMixture,
    "ens": ImageEnsemble,
    "bagging": Bagging,
    "umix": ImageUniformMixture,
    "gens": GrowingEnsemble,
    "gmoe": TreeMixture,
    "firefly": Firefly,
}
