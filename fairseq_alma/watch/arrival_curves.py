"""The figures of a run with arrivals on the x axis, for TensorBoard and Weights & Biases while it runs.

They are drawn anew from the ``stage.json`` files each time, so that no kill leaves a point twice or a gap, and a run
can be drawn when it is complete.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder
from fairseq_alma.terminal import tell

WRITE_EVERY_SECONDS = 10.0
# At most this part of the time goes into writing.
SHARE = 0.05
# What an update costs; a learner that waits spends none of it.
SPENT = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")


@dataclass(frozen=True)
class ArrivalPoint:
    """What is known after an arrival (from 0), and since when in seconds since 1970; a slash groups names."""

    arrival: int
    seconds: float
    figures: Mapping[str, float]


class Sink(Protocol):
    """Takes the points of a run."""

    def require(self) -> None:
        """Raise AlmaError, with what to do, unless points can be written."""

    def write(self, points: Sequence[ArrivalPoint]) -> None:
        """Show these points in place of those shown before. Raises AlmaError or OSError."""


class ArrivalCurves:
    """Keeps what is shown of a run's arrivals up to date.

    Args:
        run: its folder; run.json is there already.
        plans: of all its stages.
        sinks: where the points go; none: nothing is done.
    """

    def __init__(self, run: RunFolder, plans: Sequence[StagePlan], sinks: Sequence[Sink]) -> None:
        self.run = run
        self.plans = plans
        self.sinks = sinks
        self.is_behind = True  # what is complete already
        self.next = 0.0

    def begin(self) -> None:
        """Make sure that points can be shown; they are when there is time. Raises AlmaError where they cannot."""
        for sink in self.sinks:
            sink.require()

    def note_stage(self) -> None:
        """Note that a stage is complete now."""
        self.is_behind = True

    def catch_up(self) -> None:
        """Show what is complete and not shown yet, unless something was shown just before."""
        if time.monotonic() >= self.next:
            self.end()

    def end(self) -> None:
        """Show what is complete and not shown yet; what goes wrong is said, and tried again."""
        if not self.is_behind:
            return
        began = time.monotonic()
        try:
            if self.sinks:
                with self.run.lock_run():
                    points = arrival_points(self.run, self.plans)
                    for sink in self.sinks:
                        sink.write(points)
            self.is_behind = False
        except (AlmaError, OSError) as error:
            # A training of days does not end for want of a picture.
            tell(f"note: {error}; training continues, and its curves are drawn again later", sys.stderr)
        now = time.monotonic()
        self.next = now + max(WRITE_EVERY_SECONDS, (now - began) / SHARE)


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[ArrivalPoint]:
    """Return what is known of a run with these stages: one point for each arrival from the first update on.

    While a learner waits, the model of its last update counts, as in the paper's section 3.1.
    """
    points = []
    before: Optional[dict[str, float]] = None
    total = 0.0
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            before = None
            continue
        seconds = (run.stage_folder(plan.stage.index) / STAGE_RECORD).stat().st_mtime
        if before is not None:
            waiting = {**before, **{f"stage/{name}": 0.0 for name in SPENT if f"stage/{name}" in before}}
            points += [ArrivalPoint(arrival, seconds, waiting) for arrival in plan.stage.arrivals[:-1]]
        total += float(record["train_flops"])
        before = {**_flatten(record), "total/train_flops": total}
        points.append(ArrivalPoint(plan.stage.last_arrival, seconds, before))
    return points


def _flatten(record: Mapping[str, Any], group: str = "") -> dict[str, float]:
    """Return the numbers of a stage's record: ``test/loss``, ``stage/num_params``, …"""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{group}{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group or 'stage/'}{name}"] = float(value)
    return figures
