"""``--slurm``: a run as a chain of SLURM jobs, through submitit: one for each stage, and for each member of a stage.

A job is a call of ``alma-stream --stage N [--member I]`` that waits for the jobs whose weights it starts from. One that
is preempted, or reaches its time limit, is queued again and resumes: what it did stands in the run's folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import read_json_object, write_json_atomically
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.options import whole, without
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.workers import describe_status, die_with_parent, end_processes, find_program
from fairseq_alma.terminal import last_line, shell_words, tell

FOLDER = "slurm"
SUBMITTED = "submitted.json"
"""In that folder: the ids of the jobs, by which a second call finds out that they are still in the queue."""
DEFAULTS = {"time": "1440"}
MAX_NUM_TIMEOUT = 1000
GRACE_SECONDS = 3600.0
"""The longest time from SLURM's first signal to its last."""
OWNED = ("dependency", "job_name", "ntasks", "ntasks_per_node", "nodes", "output", "error", "array", "signal")
NOT_SBATCH = {"setup", "teardown", "srun_args", "use_srun", "additional_parameters", "map_count", "array_parallelism"}
NOT_SBATCH |= {"num_gpus", "signal_delay_s", "stderr_to_stdout", "command", "folder"}
"""Parameters of submitit's that are no options of sbatch: lists, and what it decides by itself."""
_LEFT_OUT = {"--slurm": None, "--dry-run": 0, "--stage": 1, "--jobs": 1}


@dataclass(frozen=True)
class SlurmJob:
    """One job of the chain.

    Attributes:
        stage: of the run.
        member: that it trains; None: it trains what is left, tests and completes the stage.
        after: numbers of the jobs that it waits for, in the chain.
    """

    stage: int
    member: Optional[int]
    after: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the job."""
        return f"stage-{self.stage}" + ("" if self.member is None else f"-member-{self.member}")


def plan_jobs(plans: Iterable[StagePlan], complete: Iterable[int] = ()) -> list[SlurmJob]:
    """Return the jobs of some stages, those that others wait for first.

    Args:
        plans: of the stages.
        complete: stages that need no job.
    """
    jobs: list[SlurmJob] = []
    of_stage: dict[int, int] = {}
    of_model: dict[ModelId, int] = {}
    for plan in plans:
        if plan.stage.index in complete:
            continue
        alone = len(plan.trainings) > 1
        starts = [training.start for training in plan.trainings if training.start is not None]
        others = {model.stage for model in [*starts, *plan.predictors]} - {plan.stage.index}
        after = {of_stage[stage] for stage in others if stage in of_stage}
        for training in plan.trainings if alone else ():
            begun = [of_model[start] for start in (training.start,) if start in of_model]
            after.add(len(jobs))
            of_model[training.model] = len(jobs)
            jobs.append(SlurmJob(plan.stage.index, training.model.member, tuple(begun)))
        of_stage[plan.stage.index] = len(jobs)
        for training in plan.trainings:
            of_model.setdefault(training.model, len(jobs))
        jobs.append(SlurmJob(plan.stage.index, None, tuple(sorted(after))))
    return jobs


class StreamCall:
    """What a job runs: submitit pickles it, and queues it again as it is.

    Args:
        arguments: of ``alma-stream``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> None:
        """Run the command; an error fails the job, so that those that wait for it do not begin."""
        dies = die_with_parent()
        ended = []
        signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))

        def prepare() -> None:
            # SLURM sends submitit's signal to every process of a job; the command goes on until submitit ends it.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            if dies is not None:
                dies()

        child = subprocess.Popen(
            [find_program("alma-stream"), *self.arguments], preexec_fn=prepare, start_new_session=True
        )
        try:
            status = child.wait()
        finally:
            end_processes([child])
        if status and ended:
            # A preemption, or scancel. Whoever ends by himself has failed, and is not queued again.
            tell("SLURM ends this job; it is queued again if it was preempted", sys.stderr)
            time.sleep(GRACE_SECONDS)
        if status:
            raise SystemExit(f"alma-stream failed ({describe_status(status)}); what it said stands above")

    def checkpoint(self) -> Any:
        """Return what submitit queues again after a preemption or at the time limit."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def read_parameters(words: Sequence[str]) -> dict[str, str]:
    """Read the parameters of ``--slurm``: options of sbatch, as ``partition=gpu gpus-per-node=8 time=1440``.

    Raises:
        ValueError: one has no value, or is not for the user to give.
    """
    found = dict(DEFAULTS)
    for word in words:
        name, is_given, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not is_given or not name.isidentifier() or not value or name in NOT_SBATCH:
            raise ValueError(f"--slurm {word}: an option of sbatch is needed, as partition=gpu or gpus-per-node=8")
        if name in OWNED:
            raise ValueError(f"--slurm {word}: alma-stream decides that; --nodes gives the number of nodes")
        found[name] = value
    for name, unit in (("time", "minutes"), ("gpus_per_task", "GPUs of a process")):
        try:
            whole(1).check(int(found.get(name, "1").rpartition(":")[2]))
        except ValueError as error:
            shown = f"--slurm {name.replace('_', '-')}={found[name]}"
            raise ValueError(f"{shown}: {unit}, a whole number of at least 1, are needed") from error
    return found


class SlurmChain:
    """The jobs of a run.

    Args:
        folder: of the run.
        words: of ``alma-stream``, what stands before ``--`` and after it.
        jobs: the chain.
        parameters: see `read_parameters`.
        nodes: of each job.
        has_members: the learner's members may be trained alone: the calls that complete stages say that they are.
        procs_per_node: processes of a training on each node; a job is one task, which starts them.
    """

    def __init__(
        self,
        folder: RunFolder,
        words: tuple[Sequence[str], Sequence[str]],
        jobs: Sequence[SlurmJob],
        parameters: Mapping[str, str],
        nodes: int,
        has_members: bool,
        procs_per_node: int = 1,
    ) -> None:
        self.folder, self.jobs, self.parameters, self.nodes = folder, jobs, parameters, nodes
        self.own, self.train = without(words[0], _LEFT_OUT), words[1]
        self.has_members, self.procs_per_node = has_members, procs_per_node
        self.place = folder.root.absolute() / FOLDER

    def print(self) -> None:
        """Print the script of each job."""
        for number, job in enumerate(self.jobs):
            after = [f"JOB_{each}" for each in job.after]
            executor = self._executor(job, after)
            print(f"# job {number}: {shell_words(['alma-stream', *self._arguments(job)])}")
            print(executor._make_submission_file_text(executor._submitit_command_str, ""))

    def submit(self) -> None:
        """Queue the jobs. Raises AlmaError if those of a call before are still in the queue, or sbatch refuses one."""
        self._refuse_second()
        ids: list[str] = []
        self.place.mkdir(parents=True, exist_ok=True)
        try:
            for job in self.jobs:
                executor = self._executor(job, [ids[each] for each in job.after])
                ids.append(executor.submit(StreamCall(self._arguments(job))).job_id)
                write_json_atomically(self.place / SUBMITTED, {"jobs": ids})
                tell(f"job {ids[-1]}: {job.name}", sys.stdout)
        except Exception as error:
            if ids:
                subprocess.run(["scancel", *ids], check=False)
            raise AlmaError(
                f"--slurm: {last_line(str(error)) or type(error).__name__}; no job is left in the queue"
            ) from error
        tell(f"{self.place}: logs; squeue shows the jobs, scancel {' '.join(ids)} ends them", sys.stdout)

    def _executor(self, job: SlurmJob, after: Sequence[str]) -> Any:
        from submitit.slurm.slurm import SlurmExecutor

        class Executor(SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                return 2  # scripts are printed where there is no SLURM, too

        executor = Executor(self.place, max_num_timeout=MAX_NUM_TIMEOUT)
        known = executor._valid_parameters() - {"additional_parameters"}
        given: dict[str, Any] = {name: value for name, value in self.parameters.items() if name in known}
        given["time"] = int(given["time"])
        if per_process := given.pop("gpus_per_task", None):  # a task is what starts the processes of a node
            kind, colon, number = per_process.rpartition(":")
            given["gpus_per_node"] = f"{kind}{colon}{int(number) * self.procs_per_node}"
        # as srun takes it from no allocation (since SLURM 22.05): one, unless it is told
        num_cpus = [f"--cpus-per-task={given['cpus_per_task']}"] if "cpus_per_task" in given else []
        others = {name.replace("_", "-"): value for name, value in self.parameters.items() if name not in known}
        executor.update_parameters(
            job_name=f"{self.folder.name}-{job.name}",
            nodes=self.nodes,
            ntasks_per_node=1,
            # The one that decides is on the first node; it starts the others, within the same resources.
            srun_args=["--overlap", "--nodes=1", "--ntasks=1", *num_cpus],
            additional_parameters={"requeue": True, "kill-on-invalid-dep": "yes", **others},
            **({"dependency": f"afterok:{':'.join(after)}"} if after else {}),
            **given,
        )
        return executor

    def _arguments(self, job: SlurmJob) -> list[str]:
        """Return the arguments of a job's call."""
        call = [*self.own, "--stage", str(job.stage)]
        if job.member is not None:
            call += ["--member", str(job.member)]
        elif self.has_members:
            call += ["--jobs", "1"]
        return [*call, "--", *self.train]

    def _refuse_second(self) -> None:
        """Raise AlmaError if jobs of this run are still in the queue."""
        path = self.place / SUBMITTED
        if not path.is_file():
            return
        ids = [str(each) for each in read_json_object(path, "remove it if no job of this run is queued")["jobs"]]
        queue = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=False)
        queued = sorted(set(ids) & set(queue.stdout.split()))
        if queued:
            raise AlmaError(
                f"--run {self.folder.root}: jobs {' '.join(queued)} of it are in the queue; wait for them, or scancel "
                "them first"
            )


def require_slurm(dry: bool) -> None:
    """Raise AlmaError unless jobs can be queued here, or printed."""
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise AlmaError("--slurm: submitit is not installed; pip install 'fairseq-alma[slurm]'") from error
    if not dry and shutil.which("sbatch") is None:
        raise AlmaError("--slurm: sbatch not found, so this is no machine of a cluster; --dry-run prints the scripts")


def require_nodes(nodes: int) -> None:
    """Raise AlmaError unless there are so many nodes for one training here."""
    given = os.environ.get("SLURM_JOB_NUM_NODES")
    if nodes > 1 and given is None:
        raise AlmaError(
            f"--nodes {nodes}: not within an allocation of SLURM; give --slurm, or begin by salloc or sbatch"
        )
    if nodes > 1 and given is not None and int(given) < nodes:
        raise AlmaError(f"--nodes {nodes}: the allocation of SLURM has {given}; ask salloc or sbatch for more")


def complete_stages(folder: RunFolder, plans: Iterable[StagePlan]) -> list[int]:
    """Return the stages that need no job."""
    return [plan.stage.index for plan in plans if folder.read_stage(plan.stage.index) is not None]
