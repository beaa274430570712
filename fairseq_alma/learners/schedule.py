"""Which mega-batches each stage of Algorithm 1 trains on. Pure arithmetic; source: the paper's Algorithm 1."""

from dataclasses import dataclass
from typing import Optional

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
