"""Several processes on one training or test: what fairseq's commands need to be told so that they work everywhere.

fairseq takes its world size from the number of visible GPUs, also to test; divides by that number under ``torchrun`` on
a CPU; and hands torch's DistributedDataParallel a device where there is none.
"""

import argparse
import ctypes
import hashlib
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, NoReturn, Optional, Sequence

import torch
import torch.distributed as dist

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.lost_processes import report_in_one_line, require_joining, watch_processes

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
"""Variables that ``torchrun`` sets for each process that it starts."""
CPU_DEFAULTS = {"distributed_backend": ("nccl", "gloo"), "ddp_backend": ("pytorch_ddp", "legacy_ddp")}
"""fairseq's default for GPUs, and what works without them; its other wrapper demands a device of torch's."""
_KEPT = {-3: 2**30, -1: 2**31 - 1}
"""Of glibc's malloc.h: what is smaller than M_MMAP_THRESHOLD comes from the heap; M_TRIM_THRESHOLD free bytes stay."""
LOCAL = ("tcp://localhost:", "tcp://127.0.0.1:")
"""What an ``--distributed-init-method`` begins with where all processes are on one machine and started by hand."""


class OnCpu(argparse.Action):
    """``--cpu``, which also turns the defaults for distributed work to what a CPU has."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Set the options; what the command line gives behind it still counts."""
        hide_gpus()
        namespace.cpu = True
        for name, (on_gpu, on_cpu) in CPU_DEFAULTS.items():
            if getattr(namespace, name, None) == on_gpu:
                setattr(namespace, name, on_cpu)


def hide_gpus() -> None:
    """Let this process, and those that it starts, see no GPU: fairseq and torch use one wherever they see it.

    Gradients' norms are moved to it, states of random numbers are asked of it, host memory is pinned for it, whatever
    device the model is on. As long as CUDA is not open, torch asks the variables again each time.
    """
    if torch.backends.cuda.is_built():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # by the variable, not by what the driver said before


def keep_freed_memory() -> None:
    """Let this process keep memory that it has freed, rather than to give it back and ask for it again in each update.

    The kernel clears fresh memory: an update of the base model (4 times 512 tokens, one core) took 0.42 of 3.95 s of
    CPU time in it, 0.06 of 3.69 with this, and 2 % more memory. glibc alone knows this call: where the C library is
    another one, or the user has set its variables, nothing is done.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        for option, size in _KEPT.items():
            tell(option, size)


def set_process_defaults(parser: argparse.ArgumentParser) -> None:
    """Give the options for distributed work of a stock command defaults that fit how it was started."""
    sys.excepthook = report_in_one_line
    keep_freed_memory()
    if "--cpu" in sys.argv:
        hide_gpus()
    if any(word.startswith(LOCAL) for word in sys.argv) or _is_started_by_hand():
        require_joining()
    # One unless the command says otherwise: what is visible here must not change a figure.
    parser.set_defaults(distributed_world_size=1)
    # `of_first` broadcasts it: what fairseq would broadcast, torch no longer unpickles.
    parser.set_defaults(load_checkpoint_on_all_dp_ranks=True)
    group = parser.add_argument_group("device", conflict_handler="resolve")  # takes the option from fairseq's own
    group.add_argument("--cpu", action=OnCpu, nargs=0, default=False, help="use the CPU, whatever GPUs there are")
    if not torch.cuda.is_available():
        parser.set_defaults(**{name: on_cpu for name, (_, on_cpu) in CPU_DEFAULTS.items()})
    if started_by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        _take_place(parser, int(os.environ["LOCAL_RANK"]))


def _take_place(parser: argparse.ArgumentParser, local_rank: int) -> None:
    """Take rank and device from the environment, as fairseq does where the number of GPUs is not 0."""
    if torch.cuda.is_available():
        if "SLURM_LOCALID" in os.environ and torch.cuda.device_count() == 1:  # gpus-per-task=1: each sees its own
            local_rank = 0
        parser.set_defaults(device_id=local_rank)
        if local_rank >= torch.cuda.device_count():
            num_local = os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1))
            refuse(f"{num_local} processes on a machine with {torch.cuda.device_count()} GPUs; start one for each GPU")
    parser.set_defaults(
        distributed_world_size=int(os.environ["WORLD_SIZE"]),
        distributed_rank=int(os.environ["RANK"]),
        distributed_init_method="env://",
        distributed_no_spawn=True,
    )


def started_by_torchrun() -> bool:
    """Tell whether this process is one of those that ``torchrun``, or ``alma-stream --num-procs``, has started."""
    return all(name in os.environ for name in TORCHRUN)


def _is_started_by_hand() -> bool:
    """Tell whether nobody ends this process if the others, on this machine, cannot begin: neither launcher did it."""
    has_launcher = "LOCAL_WORLD_SIZE" in os.environ
    return started_by_torchrun() and not has_launcher and os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1")


def world_size() -> int:
    """Return the number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Tell whether this process is the one that prints, or works alone."""
    return world_size() == 1 or dist.get_rank() == 0


def refuse(message: str) -> NoReturn:
    """End every process with status 1 after one line from the first; each must find the same fault."""
    rank = dist.get_rank() if world_size() > 1 else int(os.environ.get("RANK", 0))
    if rank > 0:
        raise SystemExit(1)
    raise AlmaError(message)


def prepare_group(same: Mapping[str, Any]) -> None:
    """Look after the processes that work together from now on, if there are several.

    Args:
        same: what all of them must have, by the option or file that says so; strings or numbers.

    Raises:
        AlmaError: they differ.
    """
    if world_size() > 1:
        watch_processes()
        for what, fingerprint in {**same, "the code of fairseq_alma": _code_fingerprint()}.items():
            require_same(what, fingerprint)


def _code_fingerprint() -> str:
    """Return a checksum of this package's files."""
    checksum = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        checksum.update(path.read_bytes())
    return checksum.hexdigest()[:12]


def require_same(what: str, fingerprint: Any) -> None:
    """End all processes with one line unless each has the same of something.

    Args:
        what: the option or file, for the line.
        fingerprint: a string or number that stands for it.
    """
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, fingerprint)
    differing = next((rank for rank, other in enumerate(found) if other != found[0]), None)
    if differing is not None:
        refuse(f"{what}: process {differing} has {found[differing]}, process 0 has {found[0]}; all need the same")


def of_first(read: Callable[[], Any]) -> Any:
    """Return in every process what a function returns in the first; only there it is called.

    Tensors, which are on the CPU, are sent one after the other, so that a GPU holds one at a time; those that share
    memory in the first process share it everywhere.

    Raises:
        SystemExit: in the others, where it has failed in the first, which raises what it has met.
    """
    if world_size() == 1:
        return read()
    found, failure, message = None, None, None
    if is_first():
        try:
            found = read()
            message = Outline.of(found)
        except Exception as error:  # the others must not wait for it
            failure = error
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    given = [message]
    dist.broadcast_object_list(given, device=device)
    if failure is not None:
        raise failure
    message = given[0]
    if message is None:
        raise SystemExit(1)
    tensors = []
    for number, (shape, dtype) in enumerate(message.tensors):
        here = message.own[number] if is_first() else torch.empty(shape, dtype=dtype)
        there = here.contiguous().to(device)
        dist.broadcast(there.view(-1).view(torch.uint8), 0)  # whatever its precision
        tensors.append(here if is_first() else here.copy_(there))
    return found if is_first() else message.filled(tensors)


def decided_by_first(decision: bool) -> bool:
    """Return in every process what the first has decided; cheap enough for each update."""
    if world_size() == 1:
        return decision
    said = torch.tensor([decision], dtype=torch.uint8, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.broadcast(said, 0)
    return bool(said.item())


class Outline:
    """An object without its tensors, to be sent.

    Attributes:
        tensors: their shapes and precisions.
        own: themselves, in the process that sends.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[torch.Size, torch.dtype]] = []
        self.own: list[torch.Tensor] = []
        self.rest = b""

    @classmethod
    def of(cls, tree: Any) -> "Outline":
        """Take an object apart."""
        outline, numbers, file = cls(), {}, io.BytesIO()

        class Taker(pickle.Pickler):
            def persistent_id(self, each: Any) -> Optional[int]:
                if not isinstance(each, torch.Tensor):
                    return None
                place = (each.data_ptr() or id(each), each.shape, each.stride(), each.dtype)
                if place not in numbers:
                    numbers[place] = len(outline.own)
                    outline.own.append(each.detach())
                    outline.tensors.append((each.shape, each.dtype))
                return numbers[place]

        Taker(file).dump(tree)
        outline.rest = file.getvalue()
        return outline

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put it together again."""

        class Filler(pickle.Unpickler):
            def persistent_load(self, number: int) -> torch.Tensor:
                return tensors[number]

        return Filler(io.BytesIO(self.rest)).load()

    def __getstate__(self) -> dict[str, Any]:
        """Send no tensors."""
        return {**vars(self), "own": []}
