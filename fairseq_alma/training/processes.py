"""Defaults of fairseq's commands for one process or several, on a GPU or a CPU.

fairseq takes its world size from the number of visible GPUs, also to test; divides by that number under ``torchrun`` on
a CPU; and hands torch's DistributedDataParallel a device on a machine without one. ``torchrun`` ends all ranks when one
fails.
"""

import argparse
import ctypes
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from fairseq_alma.errors import AlmaError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
"""Variables that ``torchrun`` sets for each rank."""
CPU_DEFAULTS = {"distributed_backend": ("nccl", "gloo"), "ddp_backend": ("pytorch_ddp", "legacy_ddp")}
"""fairseq's default for GPUs, and what works without them; its other wrapper demands a device of torch's."""
_MALLOPT = {-3: 2**30, -1: 2**31 - 1}
"""Of glibc's malloc.h: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, in bytes."""


class OnCpu(argparse.Action):
    """``--cpu``, which also turns the defaults for distributed work to what a CPU has."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        hide_gpus()
        namespace.cpu = True
        for name, (on_gpu, on_cpu) in CPU_DEFAULTS.items():
            if getattr(namespace, name, None) == on_gpu:
                setattr(namespace, name, on_cpu)


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children: fairseq and torch use one wherever they see it.

    As long as CUDA is not open, torch reads these variables again each time.
    """
    if torch.backends.cuda.is_built():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # by the variable, not by the driver's earlier answer


def keep_freed_memory() -> None:
    """Keep freed memory in this process, which the kernel would clear each time it is allocated again.

    glibc alone has this call. Nothing is done where the user has set its variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        for option, size in _MALLOPT.items():
            mallopt(option, size)


def set_process_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults of a stock command's distributed options by how the command was started."""
    keep_freed_memory()
    if "--cpu" in sys.argv:
        hide_gpus()
    # One process by default: the number of visible GPUs must not change a figure.
    parser.set_defaults(distributed_world_size=1)
    parser.set_defaults(load_checkpoint_on_all_dp_ranks=True)  # torch no longer unpickles what fairseq would broadcast
    group = parser.add_argument_group("device", conflict_handler="resolve")  # replaces fairseq's option
    group.add_argument("--cpu", action=OnCpu, nargs=0, default=False, help="use the CPU, whatever GPUs there are")
    if not torch.cuda.is_available():
        parser.set_defaults(**{name: on_cpu for name, (_, on_cpu) in CPU_DEFAULTS.items()})
    if all(name in os.environ for name in TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1:
        _take_rank(parser, int(os.environ["LOCAL_RANK"]))


def _take_rank(parser: argparse.ArgumentParser, local_rank: int) -> None:
    """Take rank and device from the environment, as fairseq does where the number of GPUs is not 0."""
    if torch.cuda.is_available():
        if "SLURM_LOCALID" in os.environ and torch.cuda.device_count() == 1:  # gpus-per-task=1: each sees its own
            local_rank = 0
        if local_rank >= torch.cuda.device_count():
            raise AlmaError(
                f"local rank {local_rank} on a machine with {torch.cuda.device_count()} GPUs; start one process for "
                "each GPU"
            )
        parser.set_defaults(device_id=local_rank)
    parser.set_defaults(
        distributed_world_size=int(os.environ["WORLD_SIZE"]),
        distributed_rank=int(os.environ["RANK"]),
        distributed_init_method="env://",
        distributed_no_spawn=True,
    )


def world_size() -> int:
    """Return the number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Return whether this is rank 0 or the only process."""
    return world_size() == 1 or dist.get_rank() == 0
