"""The stages of a stream, and what a learner decides about each, as data: the loop and the back ends carry it out.

Which mega-batches a stage trains on is the arithmetic of the paper's Algorithm 1. A plan is known before anything runs,
so that ``--dry-run`` can print it, a queue can run one stage alone, and the files that no later stage needs can be told
from those that one does.
"""

from dataclasses import dataclass, field
from typing import Mapping, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import Options, opt, whole


@dataclass(frozen=True)
class StageOptions(Options):
    """Which stage of a stream a task of fairseq's trains on."""

    megabatch: Optional[int] = opt(
        None, "train on the stage that ends with this mega-batch, from 0", range=whole(0, MAX_MEGABATCHES - 1)
    )
    wait: int = opt(1, "waiting time: mega-batches that are gathered for one stage", range=whole(1))
    replay: bool = opt(False, "train on all mega-batches up to this one")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Which stages a run has."""

    wait: int = opt(1, "mega-batches gathered before an update", range=whole(1), metavar="W")
    replay: bool = opt(False, "train on all mega-batches so far, not on the new ones alone")
    drop_rest: bool = opt(False, "leave the last mega-batches where fewer than W are left")
    iid: Optional[int] = opt(
        None,
        "instead of a stream: one stage on the shuffled union of the first K mega-batches, with K times --max-update "
        "and --total-num-update, to compare with K stages of one mega-batch each",
        range=whole(1),
        trait="has_iid_control",
        metavar="K",
    )


@dataclass(frozen=True)
class Stage:
    """One update of the model.

    Attributes:
        index: number of the stage, from 0.
        arrivals: the mega-batches that were gathered since the last stage, in order; the stage runs when the last of
            them is there.
        megabatches: the mega-batches that it trains on: the arrivals, or with replay all so far.
    """

    index: int
    arrivals: tuple[int, ...]
    megabatches: tuple[int, ...]

    @property
    def last_arrival(self) -> int:
        """The mega-batch whose arrival starts this stage."""
        return self.arrivals[-1]


def stages(num_megabatches: int, wait: int, replay: bool = False, drop_rest: bool = False) -> list[Stage]:
    """List the stages of a stream.

    Args:
        num_megabatches: B, at least 1.
        wait: w, the number of mega-batches that are gathered before an update, at least 1.
        replay: train on everything that has arrived, not on the new mega-batches alone.
        drop_rest: leave the last ``B mod w`` mega-batches (Table 2's w3 rows) rather than train on them as a last,
            shorter stage.

    Returns:
        The stages in order: for B = 4 and w = 3, mega-batches 0-2 and then 3 alone. Empty if w > B and the rest is
        dropped.
    """
    if num_megabatches < 1 or wait < 1:
        raise ValueError(f"need at least one mega-batch and a wait of at least 1, got {num_megabatches} and {wait}")
    planned = []
    for index, first in enumerate(range(0, num_megabatches, wait)):
        end = min(first + wait, num_megabatches)
        if drop_rest and end - first < wait:
            break
        planned.append(Stage(index, tuple(range(first, end)), tuple(range(0 if replay else first, end))))
    return planned


def stage_ending_with(megabatch: int, num_megabatches: int, wait: int, replay: bool = False) -> Stage:
    """Return the stage that starts when a mega-batch arrives.

    Args:
        megabatch: T, from 0 to B-1.
        num_megabatches: B.
        wait: w.
        replay: train on everything that has arrived.

    Raises:
        AlmaError: if no stage ends with this mega-batch, because a learner that waits is still waiting then.
    """
    if wait < 1:
        raise AlmaError(f"--wait {wait}: must be at least 1 mega-batch")
    planned = {stage.last_arrival: stage for stage in stages(num_megabatches, wait, replay)}
    if megabatch not in planned:
        ends = ", ".join(str(end) for end in planned)
        raise AlmaError(f"--megabatch {megabatch} --wait {wait}: no stage ends there; give one of {ends}")
    return planned[megabatch]


MEMBER_SEED_STEP = 10_000_000
_STEPS_OF_SEEDS = 400
"""As many as there are below 2**32, the largest seed that NumPy takes, less what a stage's updates add."""
MAX_MEMBERS = 200
"""Of those that one stage trains."""


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
        renew_share: copies of experts: share of their hidden units that are drawn anew.
        sizes: what a language model is to have else, by the options of ``alma-grow``, such as ``layers``.
    """

    num_new: int
    method: str
    select: str
    seed: int
    share: float = 0.0
    share_of: str = "parameters"
    noise: float = 0.0
    renew_share: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)  # a dict has none


@dataclass(frozen=True)
class Training:
    """One model to train in a stage.

    Attributes:
        model: what the result is called.
        seed: of its initial weights, order of data and dropout.
        start: the model whose weights it starts from; None: random ones.
        growth: what is done to these weights first; None: nothing.
        num_experts: experts in each Switch layer of a model that starts from random weights; None: the user says.
        sizes: of the model that is trained, by the options of fairseq-train, where the learner decides them.
        times_heads: how many times the user's attention heads it has.
        num_joint: models that are trained jointly as this one.
        joint_logits: what these are trained on and predict with: the ``mean`` of their logits, or the ``sum`` (images).
        bootstrap: train on a sample of the stage's examples, drawn with replacement.
    """

    model: ModelId
    seed: int
    start: Optional[ModelId] = None
    growth: Optional[Growth] = None
    num_experts: Optional[int] = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    times_heads: int = 1
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
        reason: of a learner that looks back: why the model grows now, or does not.
    """

    stage: Stage
    trainings: tuple[Training, ...]
    predictors: tuple[ModelId, ...]
    combine: str = "single"
    reason: Optional[str] = None

    def groups(self, size: int) -> list[Sequence[Training]]:
        """Return the trainings in groups of so many, in order; the last group may have fewer."""
        return [self.trainings[first : first + size] for first in range(0, len(self.trainings), size)]


def member_seed(seed: int, member: int) -> int:
    """Seed of a member of a run.

    Fairseq seeds update u with ``seed + u`` and epoch e with ``seed + e``, so that seeds of two members must lie
    further apart than a stage has updates: 10,000,000 of the first 400, half of that of the next 400, a quarter, ….
    Member 0 has the run's own seed: it is the single model of the same seed.

    Args:
        seed: of the run, 0 to 9,999,999.
        member: number of the member over the whole run.
    """
    turn, step = divmod(member, _STEPS_OF_SEEDS)
    between = int(f"{turn:b}"[::-1], 2) * MEMBER_SEED_STEP >> turn.bit_length()  # 0, 1/2, 1/4, 3/4, 1/8, … of a step
    return seed + MEMBER_SEED_STEP * step + between
