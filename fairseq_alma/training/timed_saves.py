"""``--save-interval-minutes``: checkpoints within a stage by the clock, where fairseq counts updates.

fairseq saves after an update whose number is a multiple of ``--save-interval-updates``: once the time has come, that
interval is the number of the update. Nothing else changes; of several processes the clock of the first counts.
"""

import time
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, Setting
from fairseq_alma.training.processes import decided_by_first


@dataclass
class TimedSaves(Feature):
    """Lets fairseq save now and then.

    Attributes:
        is_due: whether there is to be a checkpoint of the update that was just made.
    """

    save_interval_minutes: Optional[float] = opt(
        None,
        "save a checkpoint after so many minutes, beside those of --save-interval-updates",
        range=real(0, 1e8, above=True),
        side=TRAINING,
        kinds=("text",),
        metavar="M",
    )

    def __post_init__(self) -> None:
        self.is_due = False
        self._saved = time.monotonic()
        self._saving: Any = None

    def prepare(self, setting: Setting) -> None:
        """Note where fairseq looks for its interval."""
        self._saving = setting.saving
        self._interval = self._saving.save_interval_updates

    def after_step(self, model: nn.Module, update: int) -> None:
        """Look at the clock."""
        assert self.save_interval_minutes is not None  # else it is not on
        self.is_due = decided_by_first(time.monotonic() - self._saved >= 60 * self.save_interval_minutes)
        if self._saving is not None:
            self._saving.save_interval_updates = update + 1 if self.is_due else self._interval
        elif self.is_due:
            self._saved = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Keep nothing; whenever fairseq asks, it has named its checkpoint, which has the interval as it was given."""
        self._saved = time.monotonic()
        if self._saving is not None:
            self._saving.save_interval_updates = self._interval
        return {}
