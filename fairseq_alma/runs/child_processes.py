"""Child processes: found beside this Python, dead when we are, ended politely."""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Callable, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError

PATIENCE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class Child(Protocol):
    """A process as `subprocess.Popen` has it; its group has its id."""

    pid: int

    def poll(self) -> Optional[int]:
        """Return the exit status, or None while it runs."""


def find_program(name: str) -> str:
    """Return the path of a command: the one beside this Python first, so that it belongs to the same environment."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise AlmaError(f"{name}: command not found beside {sys.executable}; install fairseq into this environment")
    return found


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> Optional[Callable[[], None]]:
    """Return what a child does before it begins, so that ``kill -9`` on us ends it too (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def describe_status(status: int) -> str:
    """Say how a process ended, from its `returncode`."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")


def end_processes(children: Sequence[Child]) -> None:
    """End the processes and whatever they started, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        for child in running:
            signal_group(child.pid, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)
    # Workers of a command that has ended by itself.
    for child in children:
        signal_group(child.pid, signal.SIGKILL)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process and those of its group that are left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
