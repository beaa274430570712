"""Processes that a run starts: found beside this Python, dead when we are, ended politely; and those of ``--jobs N``.

These train the members of a run, each a call of ``alma-stream --member`` for some of them. A process goes through all
stages; the one that started it tests and completes a stage as soon as its members are there. Kept apart by the locks of
stages and members, they need no more than to tell how far they are.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.options import without
from fairseq_alma.terminal import LiveLine, last_line

POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 2.0
"""In which the other processes may end of themselves, once one has failed: what they say first may be the reason."""
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


def start_process(words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process that reads nothing and ends with us, in a group of its own: Ctrl-C reaches us, and we end it."""
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": die_with_parent(), **options}
    return subprocess.Popen(words, **own)


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


class MemberWorkers:
    """The processes; a context manager, whose end ends those that run.

    Args:
        words: of ``alma-stream``, what stands before ``--`` and after it.
        plans: of the stages that are run.
        environments: for each process the variables that it gets beside those of this one.
        group_size: members that a process trains together.
    """

    def __init__(
        self,
        words: tuple[Sequence[str], Sequence[str]],
        plans: Sequence[StagePlan],
        environments: Sequence[Mapping[str, str]],
        group_size: int = 1,
    ) -> None:
        self.words = without(words[0], {"--jobs": 1}), words[1]
        self.environments = environments
        groups = sorted(
            {tuple(each.model.member for each in group) for plan in plans for group in plan.groups(group_size)}
        )
        dealt = [groups[job :: len(environments)] for job in range(len(environments))]
        self.shares = [[member for group in share for member in group] for share in dealt if share]
        self.workers: Optional[list[MemberWorker]] = None
        self.line = LiveLine()

    def __enter__(self) -> "MemberWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.line.clear()
        if self.workers is not None:
            end_processes([worker.process for worker in self.workers])

    def await_models(self, plan: StagePlan) -> None:
        """Return when all models of a stage are trained.

        Raises:
            AlmaError: a process has failed; says what it said.
        """
        if self.workers is None:
            self.workers = []  # before the first: what has begun is ended, whatever happens now
            for share, environment in zip(self.shares, self.environments):  # noqa: B905 - fewer members than jobs
                self.workers.append(MemberWorker(self.words, share, environment))
        needed = {training.model for training in plan.trainings}
        while not needed <= {model for worker in self.workers for model in worker.trained}:
            failed = [worker for worker in self.workers if worker.process.poll()]
            if failed:
                raise AlmaError(_last_words(self.workers))
            if all(worker.process.poll() == 0 for worker in self.workers):
                return  # they passed over what was there already
            if self.line.is_due():
                self._show()
            time.sleep(POLL_SECONDS)

    def _show(self) -> None:
        """Show how far the members are that are trained now."""
        at_work = [worker.report for worker in self.workers or [] if worker.report and worker.process.poll() is None]
        if len(at_work) == 1:
            self.line.show(at_work[0]["text"], at_work[0]["done"], at_work[0]["total"], [at_work[0]["brief"]])
        elif at_work:
            totals = [report["total"] for report in at_work]
            total = None if None in totals else sum(totals)
            self.line.show("; ".join(report["brief"] for report in at_work), sum(r["done"] for r in at_work), total)


class MemberWorker:
    """One process.

    Args:
        words: see `MemberWorkers`.
        members: that it trains.
        environment: variables that it gets beside those of this process.

    Attributes:
        process: the process.
        trained: models that it has trained, or found trained.
        report: how far it is, as `watch.run_display.ReportedLine` says it.
    """

    def __init__(
        self, words: tuple[Sequence[str], Sequence[str]], members: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        self.members = members
        self.trained: set[ModelId] = set()
        self.report: dict[str, Any] = {}
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
        reader, writer = os.pipe()
        own = [*words[0], "--progress-to", str(writer), "--member", *map(str, members)]
        try:
            self.process = start_process(
                [find_program("alma-stream"), *own, "--", *words[1]],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=self.said,
                pass_fds=(writer,),
            )
        finally:
            os.close(writer)
        # A thread, as we may be at work for hours on a test, and a pipe that is full stops who writes to it.
        threading.Thread(target=self._listen, args=(os.fdopen(reader, "r"),), daemon=True).start()

    def _listen(self, reports: IO[str]) -> None:
        with reports:
            for line in reports:
                message = json.loads(line)
                if "trained" in message:
                    self.trained.add(ModelId(*message["trained"]))
                else:
                    self.report = message

    def last_line(self) -> str:
        """Return the last thing that the process said on standard error."""
        self.said.seek(0)
        return last_line(self.said.read().decode(errors="replace"))


def _last_words(workers: Sequence[MemberWorker]) -> str:
    """Say in one line why a process failed; one that was killed says nothing, and others may fail by it."""
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    while any(worker.process.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    failed = [worker for worker in workers if worker.process.poll()]
    worker = min(failed, key=lambda each: each.process.poll() or 0)  # a signal first
    status = worker.process.poll() or 0
    if status > 0 and (said := worker.last_line()):
        return said
    return (
        f"--jobs: the process of member {', '.join(map(str, worker.members))} failed ({describe_status(status)}); the "
        "same command resumes"
    )


def devices_of_jobs(num_jobs: int, num_procs: int, is_on_cpu: bool) -> list[dict[str, str]]:
    """Return for each of several processes the variables that name its devices; without GPUs none.

    Args:
        num_jobs: how many.
        num_procs: devices that each needs.
        is_on_cpu: the training does without GPUs.

    Raises:
        AlmaError: there are fewer.
    """
    if is_on_cpu:
        return [{}] * num_jobs
    import torch  # here, because it takes seconds

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    devices = devices[: torch.cuda.device_count()]
    if not devices:
        return [{}] * num_jobs
    if num_jobs * num_procs > len(devices):
        each = f" with --num-procs {num_procs}" if num_procs > 1 else ""
        raise AlmaError(
            f"--jobs {num_jobs}{each}: {num_jobs * num_procs} GPUs are needed, {len(devices)} are visible; give at "
            f"most --jobs {max(1, len(devices) // num_procs)}"
        )
    shares = [devices[job * num_procs : (job + 1) * num_procs] for job in range(num_jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
