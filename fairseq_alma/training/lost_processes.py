"""One line, and an end within a minute, where processes of one training or test lose each other.

A process that died closes its connections, and torch raises an error in the others (gloo at once, NCCL after minutes).
One that hangs, or a port that another program listens on, raises nothing for half an hour. So each process counts up a
number in the group's store and looks whether those of the others move.
"""

import itertools
import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Callable, Optional

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

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
