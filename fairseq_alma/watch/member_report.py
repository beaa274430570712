"""What a process that trains some members tells the one that started it: a line of JSON for each thing, on a pipe.

The other end is `runs.workers`.
"""

import contextlib
import json
import os
from typing import Any, Callable, Mapping, Optional, Sequence

from fairseq_alma.learners.plan import StagePlan, Training
from fairseq_alma.terminal import LiveLine
from fairseq_alma.watch.run_display import RunDisplay

EVERY_SECONDS = 0.5


class ReportedLine(LiveLine):
    """A line that is not shown here.

    Args:
        pipe: file descriptor.
    """

    def __init__(self, pipe: int) -> None:
        super().__init__(EVERY_SECONDS)
        self.is_terminal = False
        self.pipe = pipe

    def show(self, text: str, done: float = 0, total: Optional[float] = None, shorter: Sequence[str] = ()) -> None:
        """Report a text and how far it is; see `LiveLine.show`."""
        self.report({"text": text, "brief": shorter[-1] if shorter else text, "done": done, "total": total})

    def report(self, message: Mapping[str, Any]) -> None:
        """Write a message. Who has gone needs none: this process is about to end too."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, (json.dumps(message) + "\n").encode())


class MemberDisplay(RunDisplay):
    """The display of a process that trains some members.

    Args:
        pipe: file descriptor.
        plans: see `RunDisplay`, as the others.
        unit: of the data.
        work: of a training.
        only: the one stage.
        members: that are trained.
    """

    def __init__(
        self,
        pipe: int,
        plans: Sequence[StagePlan],
        unit: str,
        work: Callable[[StagePlan], float],
        only: Optional[int],
        members: Optional[Sequence[int]],
    ) -> None:
        self.reported = ReportedLine(pipe)
        super().__init__(plans, unit, work, only, members, line=self.reported)

    def skipped(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Nobody need be told that a stage was complete already."""

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Report that one member of a stage is trained."""
        super().trained(plan, training)
        self.reported.report({"trained": [training.model.stage, training.model.member]})
