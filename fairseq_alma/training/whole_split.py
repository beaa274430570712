"""Tests of the whole split, whatever the number of processes that run the stock command.

``fairseq-eval-lm`` gives each process a share and prints what the first found on its own; here every process scores all
of it, so the first prints what one process would, to the last digit. ``fairseq-validate`` shares the work: it gathers
the logs of all batches of all processes, which must be small, and are made so here.
"""

from typing import Any, Iterator, Optional

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from fairseq_alma.training.processes import world_size

GATHERED_BYTES = 2**20
"""Of each process; fairseq's own limit (``--all-gather-list-size``) is below that."""


class WholeSplit:
    """Mixed into a task, in front of fairseq's class."""

    checkpoint_path: Any
    log_so_far: Optional[dict[str, Any]] = None

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """Return fairseq's iterator; over all batches, unless ``--num-shards`` asks one process for a share."""
        if world_size() > 1:
            kwargs.update(num_shards=1, shard_id=0)
        return super().eval_lm_dataloader(*args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: Any, criterion: Any, **kwargs: Any) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one batch.

        In ``fairseq-validate`` with several processes a log takes over the sums of the one before and leaves it empty.
        """
        if self.checkpoint_path is None or world_size() == 1:
            return super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]
        # A process with a batch less than the others gets an empty one.
        loss, size, log = super().valid_step(sample, model, criterion, **kwargs) if sample else (0.0, 0, {})  # type: ignore[misc]
        log = {key: value.item() if isinstance(value, Tensor) else value for key, value in log.items()}
        before = self.log_so_far or {}
        self.log_so_far = {key: before.get(key, 0) + log.get(key, 0) for key in {**before, **log}}
        before.clear()
        _make_room_for_logs()
        return loss, size, self.log_so_far

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Aggregate the logs of all workers, but for empty ones; fairseq calls this once for each split it tests."""
        self.log_so_far = None
        super().reduce_metrics([log for log in logging_outputs if log], criterion)  # type: ignore[misc]


def _make_room_for_logs() -> None:
    """Allocate the buffers of fairseq's ``all_gather_list`` on a CPU, where it does not."""
    gather = distributed_utils.all_gather_list
    if dist.get_backend() == "gloo" and not hasattr(gather, "_buffer"):
        gather._buffer = torch.zeros(GATHERED_BYTES * world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
