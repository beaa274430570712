"""Ens and bagging: N models that differ by their seeds, each trained on its own, predict together."""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from fairseq_alma.learners.learner import Learner, register_learner
from fairseq_alma.learners.plan import MAX_MEMBERS, Stage, StagePlan
from fairseq_alma.options import opt, whole

NUM_MEMBERS = {"text": 2, "images": 5}
"""Models that predict together: Table 2 of the paper, and its image study (v5, Appendix B.1)."""


def num_members_option(help: str, default: Optional[int] = None) -> Any:
    """Declare ``--num-members``."""
    return opt(default, help, range=whole(1, MAX_MEMBERS), defaults=NUM_MEMBERS if default is None else {})


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
