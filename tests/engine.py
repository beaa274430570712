"""Run the commands of a stage as forks of the test process, as a helper process would import fairseq again.

What a shell or `subprocess` starts, and `tests/text/test_helper.py`, have the real thing.
"""

import contextlib
import functools
import os
import signal
import subprocess
import time
from typing import Any, Callable, Optional, Sequence

import pytest

from fairseq_alma.terminal import die_with_parent
from fairseq_alma.text import helper
from tests.scripts import end_with

TIMEOUT = 1800.0
REAL_HELPER = helper.Helper
import_engine = functools.cache(helper.preload)


class HelperHere:
    """A `helper.Helper` that forks this process."""

    def __init__(self) -> None:
        import_engine()
        self.children: list[int] = []

    def fork(self, call: helper.Call, files: Sequence[int]) -> None:
        self.children.append(helper.fork_child(call, files))

    def close(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def fork_commands_from_here(patch: pytest.MonkeyPatch) -> None:
    """Run the commands of a stage as forks of this process."""
    patch.setattr(helper, "Helper", HelperHere)


class Forked:
    """A forked process with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                if timeout == TIMEOUT:
                    os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def fork(act: Callable[[], Any]) -> Forked:
    """Run a function in a child of this process with its own session; the child ends with its parent."""
    die = die_with_parent()
    child = os.fork()
    if child == 0:
        if die is not None:
            die()
        os.setsid()
        end_with(act)
    return Forked(child)
