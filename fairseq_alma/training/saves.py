"""``--save-interval-minutes``: checkpoints by the clock, where fairseq counts updates.

fairseq saves after an update whose number is a multiple of ``--save-interval-updates``: once the time has come, that
interval is the number of the update. In data-parallel training the clock of rank 0 decides.
"""

import time
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, Setting
from fairseq_alma.training.processes import world_size


@dataclass
class TimedSaves(Feature):
    """Lets fairseq save every M minutes."""

    save_interval_minutes: Optional[float] = opt(
        None,
        "minutes between two checkpoints, in addition to those of --save-interval-updates",
        range=real(0, 1e8, above=True),
        side=TRAINING,
        kinds=("text",),
        metavar="M",
    )

    def __post_init__(self) -> None:
        self._saved = time.monotonic()
        self._saving: Any = None

    def prepare(self, setting: Setting) -> None:
        self._saving = setting.saving
        self._interval = self._saving.save_interval_updates

    def after_step(self, model: nn.Module, update: int) -> None:
        assert self.save_interval_minutes is not None  # else it is not on
        is_due = time.monotonic() - self._saved >= 60 * self.save_interval_minutes
        if world_size() > 1:
            decision = torch.tensor([is_due], dtype=torch.uint8, device=next(model.parameters()).device)
            dist.broadcast(decision, 0)
            is_due = bool(decision.item())
        self._saving.save_interval_updates = update + 1 if is_due else self._interval

    def state_dict(self) -> dict[str, Any]:
        """Note that fairseq saves; it has named its checkpoint by now, which has the interval as it was given."""
        self._saved = time.monotonic()
        self._saving.save_interval_updates = self._interval
        return {}
