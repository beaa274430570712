"""``--save-interval-minutes``: set the checkpoint interval in minutes; fairseq supports only updates and epochs.

fairseq saves after each update whose number is a multiple of ``--save-interval-updates``. When a checkpoint is due, the
feature sets this interval to the number of the current update. In distributed training, rank 0 measures the time.
"""

import time
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from torch import nn

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, Setting


@dataclass
class TimedSaves(Feature):
    """Feature that saves a checkpoint of fairseq-train every M minutes."""

    save_interval_minutes: Optional[float] = opt(
        None,
        "checkpoint interval in minutes, in addition to --save-interval-updates",
        range=real(0, 1e8, above=True),
        side=TRAINING,
        kinds=("text",),
        metavar="M",
    )

    def prepare(self, setting: Setting) -> None:
        self._saved = time.monotonic()
        self._saving: Any = setting.saving
        self._interval = self._saving.save_interval_updates

    def after_step(self, model: nn.Module, update: int) -> None:
        assert self.save_interval_minutes is not None
        is_due = time.monotonic() - self._saved >= 60 * self.save_interval_minutes
        if distributed_utils.get_global_world_size() > 1:
            decision = torch.tensor([is_due], dtype=torch.uint8, device=next(model.parameters()).device)
            dist.broadcast(decision, 0)
            is_due = bool(decision.item())
        self._saving.save_interval_updates = update + 1 if is_due else self._interval

    def state_dict(self) -> dict[str, Any]:
        """Restart the interval; return no state. fairseq calls this method when saving, after choosing file names."""
        self._saved = time.monotonic()
        self._saving.save_interval_updates = self._interval  # the user's interval, for the options in the checkpoint
        return {}
