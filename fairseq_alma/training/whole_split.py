"""Tests of the whole split, whatever the number of processes that run the stock command.

``fairseq-eval-lm`` gives each process a share and prints what the first found on its own; here every process scores all
of it, so the first prints what one process would, to the last digit. ``fairseq-validate`` shares the work: it gathers
the logs of all batches of all processes, which must be small, and are made so here.
"""

from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from fairseq_alma.training.processes import world_size

GATHERED_BYTES = 2**20
"""Of each process; fairseq's own limit (``--all-gather-list-size``) is below that."""


class WholeSplit:
    """What a task does with a split that it tests.

    Args:
        is_test: whether the command tests a checkpoint rather than trains.
    """

    def __init__(self, is_test: bool) -> None:
        self.is_test = is_test
        self.log_so_far: Optional[dict[str, Any]] = None

    def score(
        self, step: Callable[[], tuple[Any, int, dict[str, Any]]], sample: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one batch.

        In ``fairseq-validate`` with several processes a log takes over the sums of the one before and leaves it empty.

        Args:
            step: fairseq's.
            sample: the batch.
        """
        if not self.is_test or world_size() == 1:
            return step()
        # A process with a batch less than the others gets an empty one.
        loss, size, log = step() if sample else (0.0, 0, {})
        log = {key: value.item() if isinstance(value, Tensor) else value for key, value in log.items()}
        before = self.log_so_far or {}
        self.log_so_far = {key: before.get(key, 0) + log.get(key, 0) for key in {**before, **log}}
        before.clear()
        _make_room_for_logs()
        return loss, size, self.log_so_far

    def gathered(self, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logs of all processes but for empty ones; fairseq asks once for each split that it tests."""
        self.log_so_far = None
        return [log for log in logs if log]


def whole_share() -> dict[str, int]:
    """Return the arguments by which fairseq-eval-lm's iterator is over all batches where there are several processes.

    One process alone has the share that ``--num-shards`` asks for.
    """
    return {"num_shards": 1, "shard_id": 0} if world_size() > 1 else {}


def _make_room_for_logs() -> None:
    """Allocate the buffers of fairseq's ``all_gather_list`` on a CPU, where it does not."""
    gather = distributed_utils.all_gather_list
    if dist.get_backend() == "gloo" and not hasattr(gather, "_buffer"):
        gather._buffer = torch.zeros(GATHERED_BYTES * world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
