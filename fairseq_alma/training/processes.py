"""Several processes on one training or test: what fairseq's commands need to be told so that they work everywhere.

fairseq takes its world size from the number of visible GPUs, also to test; divides by that number under ``torchrun`` on
a CPU; and hands torch's DistributedDataParallel a device where there is none.

Where processes lose each other there is one line, and an end within a minute. A process that died closes its
connections, and torch raises an error in the others (gloo at once, NCCL after minutes). One that hangs, or a port that
another program listens on, raises nothing for half an hour. So each process counts up a number in the group's store and
looks whether those of the others move.
"""

import argparse
import ctypes
import hashlib
import io
import itertools
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Mapping, NoReturn, Optional, Sequence

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from fairseq_alma.errors import AlmaError

JOIN_SECONDS = 50.0
"""In which processes on one machine must have found each other; torch's own limit is 30 minutes."""
SILENCE_SECONDS = 40.0
"""After which a process counts as lost. Nothing that a process does keeps its other threads from running that long."""
BEAT_SECONDS = 2.0
FIRST_SPEAKS_SECONDS = 5.0
"""After which another process than the first says what the first has not said."""

CLAIMS: list[socket.socket] = []
"""Held until this process ends; see `_is_first_on_this_machine`."""

RESUME = "what it said stands above; the same command resumes from the last checkpoint"
MEANINGS = {
    "EADDRINUSE": "the port of the process group is in use; end what uses it or give another (torchrun --master-port, "
    "--distributed-init-method)",
    "onnection closed by peer": f"another process of this run has died; {RESUME}",
    "terminated with signal": f"another process of this run has died; {RESUME}",
    "terminated with exit code": f"another process of this run has failed; {RESUME}",
    "onnection reset by peer": f"another process of this run has died; {RESUME}",
    "imed out": f"another process of this run does not answer; {RESUME}",
    "available devices": "more processes than GPUs; give --distributed-world-size their number or less",
    "Must specify batch size": "--batch-size: no size of batches is given; give it in sequences, or --max-tokens",
    "uninitialized 'dummy' batch": "fewer batches than processes; give a smaller --batch-size or start fewer processes",
}
"""What errors of fairseq and torch say, and what that means where several processes work together."""


def report_in_one_line(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    """Serve as ``sys.excepthook``: a line from the first process where another one is the reason, else as ever."""
    of_several = dist.is_initialized() or isinstance(error, (dist.DistError, ProcessException, AssertionError))
    meaning = explain(str(error)) if of_several else None
    if meaning is None:
        # where processes work together torch puts a buffer in the place of sys.stderr, which ends with this process
        file = sys.__stderr__ if dist.is_initialized() else sys.stderr
        traceback.print_exception(kind, error, trace, file=file)
    elif _speaks():
        print(meaning, file=sys.__stderr__)  # torch puts a buffer in the place of sys.stderr
        time.sleep(1.0)  # with the store of the group, by which the others see that the first one speaks
    if meaning is not None or dist.is_initialized():
        end_process()  # a group without one of its members may wait for it at the end of the interpreter


def explain(text: str) -> Optional[str]:
    """Return what the text of an error means, or None if it says nothing of processes."""
    ours = text.rfind("fairseq_alma.errors.AlmaError: ")  # in a process that fairseq has spawned
    if ours >= 0:
        return text[ours:].splitlines()[0].split(": ", 1)[1]
    meaning = next((meaning for part, meaning in MEANINGS.items() if part in text), None)
    return meaning or (_what_nccl_says(text) if "NCCL" in text else None)


def _what_nccl_says(text: str) -> str:
    """Return one line of an error of NCCL's: its name, and its last words, which stand in lines of their own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = next((line for line in lines if line.startswith("nccl")), lines[0])
    after = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    said = " ".join([named, *after[:1]])
    return f"NCCL: {said}; if another process of this run has died, {RESUME}"


def end_process() -> None:
    """End this process with status 1, whatever its threads wait for."""
    for file in (sys.stdout, sys.__stdout__, sys.__stderr__):
        if file is not None:
            file.flush()
    os._exit(1)


def require_joining(end: Callable[[], None] = end_process) -> None:
    """End this process unless it has joined its process group in time.

    Args:
        end: ends it.
    """

    def wait() -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while not dist.is_initialized():
            if time.monotonic() > deadline:
                print(
                    f"no process group after {JOIN_SECONDS:.0f} seconds; start as many processes as "
                    "--distributed-world-size says, with one --distributed-init-method whose port is free",
                    file=sys.__stderr__,
                )
                return end()
            time.sleep(BEAT_SECONDS / 4)

    threading.Thread(target=wait, daemon=True).start()


class ProcessWatch:
    """Ends this process when another one of its group is silent.

    Args:
        store: of the group, on a connection of its own.
        rank: of this process.
        num_processes: in the group.
        end: ends this process.
    """

    def __init__(self, store: Any, rank: int, num_processes: int, end: Callable[[], None] = end_process) -> None:
        self.store, self.rank, self.end = store, rank, end
        self.others = [other for other in range(num_processes) if other != rank]
        self.last_heard = dict.fromkeys(self.others, time.monotonic())
        self.last_beat: dict[int, bytes] = {}

    def start(self) -> None:
        """Begin to beat and to listen, beside what the process does."""
        for loop in (self._beat_on, self._listen):  # two, as a store whose process hangs answers nobody
            threading.Thread(target=loop, daemon=True).start()

    def _beat_on(self) -> None:
        for beats in itertools.count():
            self._beat(beats)
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            silent = [other for other in self.others if time.monotonic() - self.last_heard[other] > SILENCE_SECONDS]
            if silent:
                self._report(silent)
                return self.end()

    def _beat(self, beats: int) -> None:
        """Say that this process lives, and hear which others do."""
        try:
            self.store.set(f"beat/{self.rank}", str(beats))
            for other in self.others:
                beat = self.store.get(f"beat/{other}") if self.store.check([f"beat/{other}"]) else b""
                if beat != self.last_beat.get(other):
                    self.last_beat[other], self.last_heard[other] = beat, time.monotonic()
        except RuntimeError:  # the first process, which holds the store, is gone
            return

    def _report(self, silent: list[int]) -> None:
        if self.rank == min({self.rank, *self.others} - {*silent}):
            names = ", ".join(map(str, silent))
            print(f"process {names} of this run does not answer; {RESUME}", file=sys.__stderr__)


def watch_processes() -> None:
    """Watch the other processes of the group, which is there, from now on."""
    sys.excepthook = report_in_one_line  # again, as torch has put its own in front
    clone = getattr(dist.distributed_c10d._get_default_store(), "clone", None)
    if clone is not None:  # not so in early versions of torch
        ProcessWatch(clone(), dist.get_rank(), dist.get_world_size()).start()


def _speaks() -> bool:
    """Tell whether it is for this process to print the one line."""
    if not dist.is_initialized():
        return _rank() == 0
    return speaks_for_all(dist.distributed_c10d._get_default_store(), dist.get_rank())


def speaks_for_all(store: Any, rank: int) -> bool:
    """Tell whether it is for this process to print the one line: the first, or one of those that are left.

    The store may outlive the first process, as ``torchrun`` keeps it, or go with it. Then nobody can know whether the
    first has spoken, and on each machine the one speaks that finds out first: its launcher may end the others at once.

    Args:
        store: of the group.
        rank: of this process.
    """
    try:
        if rank == 0:
            store.set("first/speaks", "1")
            return True
        deadline = time.monotonic() + FIRST_SPEAKS_SECONDS
        while time.monotonic() < deadline:
            if store.check(["first/speaks"]):
                return False
            time.sleep(FIRST_SPEAKS_SECONDS / 50)
        return store.add("others/speak", 1) == 1
    except RuntimeError:  # the process that held the store is gone
        return rank == 0 or _is_first_on_this_machine()


def _is_first_on_this_machine() -> bool:
    """Tell whether no other process of this run here has asked and still runs; where none can tell, each may speak."""
    if not sys.platform.startswith("linux"):
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0fairseq_alma-{os.environ.get('MASTER_PORT')}")  # a name that ends with the process, no file
    except OSError:
        return False
    CLAIMS.append(claim)
    return True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


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
