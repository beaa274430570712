"""Start child processes that exit when this process exits, such as the processes of ``--jobs N``.

``--jobs N`` starts N calls of ``alma-stream --member``. Each call trains some members in all stages. The parent process
evaluates the ensemble and completes the stage as soon as all members of the stage are trained.
"""

import contextlib
import ctypes
import os
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

ALMA_STREAM = (sys.executable, "-c", "import sys; from fairseq_alma.cli.start import stream; sys.exit(stream())")
PATIENCE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Optional[Callable[[], None]]:
    """Return a ``preexec_fn`` for a child process that must exit when its parent is killed; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start_process(words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child without stdin in a new session. The child exits if this process is killed, but not on Ctrl-C."""
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": die_with_parent(), **options}
    return subprocess.Popen(words, **own)


def end_processes(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Send SIGTERM to the process groups of running children, then SIGKILL to all; wait up to 10 seconds each time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if number == signal.SIGKILL or child.poll() is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)


class MemberJobs(contextlib.AbstractContextManager["MemberJobs"]):
    """Context manager that starts the processes of ``--jobs N`` and terminates them on exit.

    Args:
        words: (arguments before ``--``, arguments after ``--``) of ``alma-stream``.
        folder: run folder.
        plans: plans of the requested stages.
        environments: for each process, additional environment variables.
    """

    def __init__(
        self,
        words: tuple[Sequence[str], Sequence[str]],
        folder: RunFolder,
        plans: Sequence[StagePlan],
        environments: Sequence[Mapping[str, str]],
    ) -> None:
        self.words, self.folder, self.environments = words, folder, environments
        self.members = sorted({training.model.member for plan in plans for training in plan.trainings})
        self.jobs: list[tuple[subprocess.Popen[bytes], Any]] = []

    def __exit__(self, *exception: object) -> None:
        end_processes([process for process, _ in self.jobs])

    def await_models(self, plan: StagePlan) -> None:
        """Start the processes at the first call; wait until the models of a stage are trained or all processes exit."""
        if not self.jobs:
            own = without(self.words[0], {"--jobs": 1})
            for number, environment in enumerate(self.environments[: len(self.members)]):
                members = map(str, self.members[number :: len(self.environments)])
                errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process exits
                words = [*ALMA_STREAM, *own, "--member", *members, "--", *self.words[1]]
                variables = {**os.environ, **environment}
                process = start_process(words, env=variables, stdout=subprocess.DEVNULL, stderr=errors)
                self.jobs.append((process, errors))
        while not all(self.folder.is_member_trained(training.model) for training in plan.trainings):
            ended = [(process, errors) for process, errors in self.jobs if process.poll() is not None]
            for process, errors in ended:
                if process.returncode:
                    errors.seek(0)
                    killed = ", SIGKILL, possibly out of memory" if process.returncode == -signal.SIGKILL else ""
                    status = f"exit status {process.returncode}{killed}"
                    message = f"--jobs: a process failed ({status}); run the same command to resume"
                    line = last_line(errors.read().decode(errors="replace"))
                    raise AlmaError(line if line and process.returncode > 0 else message)
            if len(ended) == len(self.jobs):
                return
            time.sleep(0.1)


def devices_of_jobs(num_jobs: int, num_procs: int, is_on_cpu: bool) -> list[dict[str, str]]:
    """Return the variables that select the GPUs of each job (none on CPU). Raises AlmaError for too few GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]
    devices = devices if visible is None else [each for each in visible.split(",") if each]
    if is_on_cpu or not devices:
        return [{}] * num_jobs
    if num_jobs * num_procs > len(devices):
        most = f"--jobs {len(devices) // num_procs}" if num_procs <= len(devices) else f"--num-procs {len(devices)}"
        raise AlmaError(
            f"--jobs {num_jobs}, --num-procs {num_procs}: expected {num_jobs * num_procs} visible GPUs, found "
            f"{len(devices)}; give at most {most}"
        )
    shares = [devices[job * num_procs : (job + 1) * num_procs] for job in range(num_jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
