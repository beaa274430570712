"""What a learner decides about one stage, as data: the loop and the back ends carry it out.

A plan is known before anything runs, so that ``--dry-run`` can print it, a queue can run one stage alone, and the
files that no later stage needs can be told from those that one does.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

from fairseq_alma.learners.schedule import Stage

MEMBER_SEED_STEP = 10_000_000
MAX_MEMBERS = 200


@dataclass(frozen=True, order=True)
class ModelId:
    """Which trained model: the stage that trained it last, and its member number."""

    stage: int
    member: int


@dataclass(frozen=True)
class Growth:
    """What is added to a model between two stages.

    Attributes:
        num_new: experts to add to each layer that has experts.
        method: ``copy``, ``split`` or ``scratch``; ``firefly``: neurons rather than experts.
        select: which experts are copied or split: ``loss``, ``usage`` or ``random``.
        seed: of new weights and random choices.
        share: of the first size that is added as neurons.
        share_of: what ``share`` counts: ``parameters`` or ``neurons``.
        noise: copies of experts: standard deviation of the noise on their gate rows.
        layers: layers that a language model is to have; None: as many as before.
    """

    num_new: int
    method: str
    select: str
    seed: int
    share: float = 0.0
    share_of: str = "parameters"
    noise: float = 0.0
    layers: Optional[int] = None


@dataclass(frozen=True)
class Training:
    """One model to train in a stage.

    Attributes:
        model: what the result is called.
        seed: of its initial weights, order of data and dropout.
        start: the model whose weights it starts from; None: random ones.
        growth: what is done to these weights first; None: nothing.
        num_experts: experts in each Switch layer of a model that starts from random weights; None: the user says.
        num_layers: layers of the model that is trained; None: the user says.
        num_joint: models that are trained jointly as this one.
        joint_logits: what these are trained on and predict with: the ``mean`` of their logits, or the ``sum`` (images).
        bootstrap: train on a sample of the stage's examples, drawn with replacement.
    """

    model: ModelId
    seed: int
    start: Optional[ModelId] = None
    growth: Optional[Growth] = None
    num_experts: Optional[int] = None
    num_layers: Optional[int] = None
    num_joint: int = 1
    joint_logits: str = "mean"
    bootstrap: bool = False


@dataclass(frozen=True)
class StagePlan:
    """Everything that happens in a stage.

    Attributes:
        stage: the data.
        trainings: models to train, independent of each other.
        predictors: models that predict afterwards; those that are not trained in this stage stay as they are.
        combine: how their predictions become one: ``single`` for one model, else ``probabilities`` (mean), ``logits``
            (mean) or ``vote``.
    """

    stage: Stage
    trainings: tuple[Training, ...]
    predictors: tuple[ModelId, ...]
    combine: str = "single"

    def training_of(self, member: int) -> Optional[Training]:
        """Return the training of a member, or None if the stage does not train it."""
        return next((training for training in self.trainings if training.model.member == member), None)

    def groups(self, size: int) -> list[Sequence[Training]]:
        """Return the trainings in groups of so many, in order; the last group may have fewer."""
        return [self.trainings[first : first + size] for first in range(0, len(self.trainings), size)]


def member_seed(seed: int, member: int) -> int:
    """Seed of a member of a run.

    Fairseq seeds update u with ``seed + u`` and epoch e with ``seed + e``, so that seeds of two members must lie
    further apart than a run has updates. Member 0 has the run's own seed: it is the single model of the same seed.

    Args:
        seed: of the run, 0 to 9,999,999.
        member: number of the member over the whole run, 0 to 199.
    """
    return seed + MEMBER_SEED_STEP * member
