"""Set the defaults of fairseq's commands for distributed training, on GPUs or CPUs.

fairseq sets the world size to the number of visible GPUs, also in evaluation. On CPUs under ``torchrun``, fairseq
divides by this number, which is zero. fairseq also passes a device to torch's DistributedDataParallel, which accepts no
device on CPUs.
"""

import argparse
import ctypes
import os
import sys
from typing import Any

import torch

from fairseq_alma.errors import AlmaError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
"""Environment variables set by ``torchrun``."""
CPU_DEFAULTS = {"distributed_backend": ("nccl", "gloo"), "ddp_backend": ("pytorch_ddp", "legacy_ddp")}
"""Option of fairseq -> (default for GPUs, default for CPUs)."""
_MALLOPT = {-3: 2**30, -1: 2**31 - 1}
"""Values of glibc's mallopt parameters M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1), in bytes."""


class _OnCpu(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        hide_gpus()
        namespace.cpu = True
        for name, (on_gpu, on_cpu) in CPU_DEFAULTS.items():
            if getattr(namespace, name, None) == on_gpu:
                setattr(namespace, name, on_cpu)


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children, because fairseq and torch use visible GPUs.

    The caller must not have initialized CUDA.
    """
    if torch.backends.cuda.is_built():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # makes torch read CUDA_VISIBLE_DEVICES again


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, because clearing newly allocated pages takes time.

    Environment variables that configure glibc's memory allocation take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        for option, size in _MALLOPT.items():
            mallopt(option, size)


def set_process_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults of a fairseq command for the device and for distributed training with ``torchrun``."""
    keep_freed_memory()
    if "--cpu" in sys.argv:
        hide_gpus()
    # The default is one process, because results must not depend on the number of visible GPUs. All ranks load the
    # checkpoint, because torch does not unpickle the objects that fairseq broadcasts.
    parser.set_defaults(distributed_world_size=1, load_checkpoint_on_all_dp_ranks=True)
    group = parser.add_argument_group("device", conflict_handler="resolve")  # replaces fairseq's --cpu
    group.add_argument("--cpu", action=_OnCpu, nargs=0, default=False, help="use the CPU even if a GPU is available")
    if not torch.cuda.is_available():
        parser.set_defaults(**{name: on_cpu for name, (_, on_cpu) in CPU_DEFAULTS.items()})
    if any(name not in os.environ for name in TORCHRUN) or int(os.environ["WORLD_SIZE"]) == 1:
        return
    if torch.cuda.is_available():
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if "SLURM_LOCALID" in os.environ and num_gpus == 1:  # SLURM makes one GPU visible to each task
            local_rank = 0
        if local_rank >= num_gpus:
            raise AlmaError(f"LOCAL_RANK={local_rank}: the machine has {num_gpus} GPUs; start one process per GPU")
        parser.set_defaults(device_id=local_rank)
    parser.set_defaults(
        distributed_world_size=int(os.environ["WORLD_SIZE"]),
        distributed_rank=int(os.environ["RANK"]),
        distributed_init_method="env://",
        distributed_no_spawn=True,
    )
