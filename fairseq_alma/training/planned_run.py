"""What a training feature may know of a run before anything is trained; neither torch nor fairseq."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional, Sequence

from fairseq_alma.learners.learner import StagePlan

if TYPE_CHECKING:
    from fairseq_alma.training.feature import Features

ENDLESS = ("fixed", "inverse_sqrt")
"""Schedules without a horizon; fairseq's ``fixed`` is a warm-up, then constant."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of alma-stream. The checks raise ValueError with a message that begins with the feature's option.

    Attributes:
        kind: of data.
        plans: of all stages.
        replay: whether each stage trains on all mega-batches so far.
        last: returns the values of the last occurrence of an option after ``--``; None: not given.
        features: all that the run has.
    """

    kind: str
    plans: Sequence[StagePlan]
    replay: bool
    last: Callable[[str], Optional[tuple[str, ...]]]
    features: "Features"

    @property
    def max_update(self) -> Optional[int]:
        """Updates of a stage."""
        number = self.number("--max-update")
        return None if number is None else int(number)

    @property
    def schedule(self) -> str:
        """Name of the learning-rate schedule."""
        return " ".join(self.last("--lr-scheduler") or ("fixed",))

    def number(self, name: str) -> Optional[float]:
        """Return the value of a numeric option."""
        values = self.last(name)
        return None if values is None else float(" ".join(values))

    def require_updates(self, flag: str) -> None:
        """Refuse stages of text that epochs end, and of images that end early."""
        if self.kind == "images" and self.last("--patience") is not None:
            raise ValueError(f"{flag}: counts the updates of a stage, which --patience may end early; omit --patience")
        if self.kind == "text" and (self.max_update is None or self.last("--max-epoch") is not None):
            raise ValueError(f"{flag}: counts the updates of a stage; give --max-update after the --, no --max-epoch")

    def require_endless(self, flag: str) -> None:
        """Refuse schedules that decay by themselves, and rates that depend on the epoch."""
        if self.schedule not in ENDLESS:
            raise ValueError(
                f"{flag}: --lr-scheduler {self.schedule} decays by itself; give {' or '.join(ENDLESS)} instead"
            )
        self.refuse_rates_by_epoch(flag)

    def refuse_rates_by_epoch(self, flag: str) -> None:
        """Refuse learning rates that begin anew in each stage."""
        rates = " ".join(self.last("--lr") or ())
        if "," in rates or self.last("--force-anneal") is not None:
            given = f"--lr {rates}" if "," in rates else "--force-anneal"
            raise ValueError(f"{flag}: {given} depends on the epoch, which begins anew in each stage; give one --lr")
