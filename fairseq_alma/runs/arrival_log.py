"""The figures of a run with arrivals on the x axis, for TensorBoard and Weights & Biases while it runs.

They are drawn anew from the ``stage.json`` files each time, so that no kill leaves a point twice or a gap, and a run
can be drawn when it is complete.
"""

import sys
import time
from typing import Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.arrival_points import Point, arrival_points
from fairseq_alma.runs.live_log import LiveLog
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.tensorboard_sink import TensorBoardSink
from fairseq_alma.runs.wandb_sink import WandbSink

WRITE_EVERY_SECONDS = 10.0
# At most this part of the time goes into writing.
SHARE = 0.05


class Sink(Protocol):
    """Takes the points of a run."""

    def require(self) -> None:
        """Raise AlmaError, with what to do, unless points can be written."""

    def write(self, points: Sequence[Point]) -> None:
        """Show these points in place of those shown before. Raises AlmaError or OSError."""


class ArrivalLog:
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
            self._write()
        except (AlmaError, OSError) as error:
            # A training of days does not end for want of a picture.
            print(f"note: {error}; the run goes on, and its curves are drawn again later", file=sys.stderr, flush=True)
        now = time.monotonic()
        self.next = now + max(WRITE_EVERY_SECONDS, (now - began) / SHARE)

    def _write(self) -> None:
        if self.sinks:
            with self.run.lock_run():
                points = arrival_points(self.run, self.plans)
                for sink in self.sinks:
                    sink.write(points)
        self.is_behind = False


def sinks_of(run: RunFolder, live: LiveLog) -> list[Sink]:
    """Return where the user wants to see the points."""
    sinks: list[Sink] = []
    if live.tensorboard is not None:
        sinks.append(TensorBoardSink(run, live))
    if live.wandb_project is not None:
        sinks.append(WandbSink(run, live.wandb_project))
    return sinks
