"""Processes that a run starts: found next to this Python, dead when we are; and those of ``--jobs N``.

``--jobs N`` deals the members of a run to N calls of ``alma-stream --member``, each of which goes through all stages.
The command that started them tests and completes a stage as soon as its members are trained. Locks keep them apart.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.options import without
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.terminal import last_line

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def find_program(name: str) -> str:
    """Return the path of a command: the one next to this Python first, so that it belongs to the same environment."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise AlmaError(f"{name}: command not found next to {sys.executable}; install it into this environment")
    return found


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> Optional[Callable[[], None]]:
    """Return what a child calls before it begins, so that ``kill -9`` on its parent ends it too (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start_process(words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process that reads nothing and ends with us, in a group of its own: Ctrl-C reaches us, and we end it."""
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": die_with_parent(), **options}
    return subprocess.Popen(words, **own)


def describe_status(status: int) -> str:
    """Return how a process ended, from its `returncode`."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")


def end_processes(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End processes by SIGTERM, and what is left of their groups by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if number == signal.SIGKILL or child.poll() is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)


class MemberJobs:
    """The processes of ``--jobs N``; a context manager, whose end ends those that run.

    Args:
        words: of ``alma-stream``, before ``--`` and after it.
        folder: of the run.
        plans: of the stages that are run.
        environments: for each process the variables that it gets next to those of this one.
    """

    def __init__(
        self,
        words: tuple[Sequence[str], Sequence[str]],
        folder: RunFolder,
        plans: Sequence[StagePlan],
        environments: Sequence[Mapping[str, str]],
    ) -> None:
        self.words, self.folder, self.environments = words, folder, environments
        members = sorted({training.model.member for plan in plans for training in plan.trainings})
        shares = (members[job :: len(environments)] for job in range(len(environments)))
        self.shares = [share for share in shares if share]
        self.jobs: list[tuple[subprocess.Popen[bytes], Any]] = []

    def __enter__(self) -> "MemberJobs":
        return self

    def __exit__(self, *exception: object) -> None:
        end_processes([process for process, _ in self.jobs])

    def await_models(self, plan: StagePlan) -> None:
        """Return when all models of a stage are trained, or no process is left that trains any.

        Raises:
            AlmaError: a process has failed; has its last line.
        """
        if not self.jobs:
            self._begin()
        while not all(self.folder.is_member_trained(training.model) for training in plan.trainings):
            ended = [(process, errors) for process, errors in self.jobs if process.poll() is not None]
            for process, errors in ended:
                if process.returncode:
                    errors.seek(0)
                    said = last_line(errors.read().decode(errors="replace"))
                    failed = (
                        f"--jobs: a process failed ({describe_status(process.returncode)}); the same command resumes"
                    )
                    raise AlmaError(said if process.returncode > 0 and said else failed)
            if len(ended) == len(self.jobs):
                return
            time.sleep(POLL_SECONDS)

    def _begin(self) -> None:
        own = without(self.words[0], {"--jobs": 1})
        for share, environment in zip(self.shares, self.environments, strict=False):  # there may be fewer members
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
            words = [find_program("alma-stream"), *own, "--member", *map(str, share), "--", *self.words[1]]
            variables = {**os.environ, **environment}
            process = start_process(words, env=variables, stdout=subprocess.DEVNULL, stderr=errors)
            self.jobs.append((process, errors))


def devices_of_jobs(num_jobs: int, num_procs: int, is_on_cpu: bool) -> list[dict[str, str]]:
    """Return for each of several processes the variables that name its GPUs; without GPUs none.

    Args:
        num_jobs: number of processes.
        num_procs: GPUs that each needs.
        is_on_cpu: whether the training uses no GPU.

    Raises:
        AlmaError: there are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]
    devices = devices if visible is None else [each for each in visible.split(",") if each]
    if is_on_cpu or not devices:
        return [{}] * num_jobs
    if num_jobs * num_procs > len(devices):
        raise AlmaError(
            f"--jobs {num_jobs}, --num-procs {num_procs}: {num_jobs * num_procs} GPUs are needed, {len(devices)} are "
            f"visible; give at most --jobs {max(1, len(devices) // num_procs)}"
        )
    shares = [devices[job * num_procs : (job + 1) * num_procs] for job in range(num_jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
