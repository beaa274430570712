"""Make one stream in every way there is, and compare: alma-prep-text, datatrove here, on SLURM, on Ray, killed or not.

Ways whose engine is not there are skipped with the reason. Killed: in each stage one rank ends by ``kill -9`` where it
writes its second file (its first, where it is alone), and what the engine does not start again itself is started again.
Run from the root of a checkout; SLURM must see this folder at the same place. Time: for 26 MB one to five minutes a
way, ten where ranks are killed.

    python recipes/benchmarks/prep_engines.py texts/ --partition cpu --store s3://bucket/try -- --megabatches 3
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.text.cluster import StreamStage, run_stages, stream_stages
from data_prep.text.command import main as prep_text
from fairseq_alma.data.stream import file_sha256

TASKS = 2
PATIENCE = 1800.0  # seconds
QUEUE = ["squeue", "--me", "--noheader", "--name", "alma-engines", "--format"]


class DiesOnce(PipelineStep):
    """A stage whose rank 0 is killed once.

    Args:
        stage: what is done.
        marks: folder that notes who has died.
        engine: that runs it.
    """

    type = "dies once"

    def __init__(self, stage: StreamStage, marks: str, engine: str) -> None:
        self.name, self.is_single = stage.name, stage.is_single
        super().__init__()
        self.stage, self.marks, self.engine = stage, marks, engine

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """See `StreamStage`."""
        # Here, as what SLURM runs unpickles this class without the names of this file.
        import os
        import signal
        from pathlib import Path

        from data_prep.text.passes import Folder

        mark, write = Path(self.marks, self.name), Folder.writing
        left = iter(range(0 if self.is_single else 1))

        def die(*arguments):
            if next(left, None) is not None:
                return write(*arguments)
            mark.touch()
            if self.engine == "ray":
                os.kill(os.getppid(), signal.SIGKILL)  # the actor, whose child this is
            if self.engine == "local":
                os.killpg(0, signal.SIGKILL)  # a pool waits for ever for one of its processes
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 0 and not mark.exists():
            Folder.writing = die  # type: ignore[method-assign]
        try:
            self.stage.run(data, rank, world_size)
        finally:
            Folder.writing = write  # type: ignore[method-assign]


def run(engine: str, words: list[str], work: str, folder: Path, options: dict[str, Any], killed: bool) -> None:
    """Give the stages to an engine, once."""
    stages: list[Any] = stream_stages(words, work)
    if killed:
        (folder / "marks").mkdir(exist_ok=True)
        stages = [DiesOnce(stage, str(folder / "marks"), engine) for stage in stages]
    if engine == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    executors = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}
    run_stages(stages, executors[engine], TASKS, str(folder / "logs"), **options)


def until_there(engine: str, out: Path, start: Callable[[], int]) -> int:
    """Start until the stream is there; return how often that was not the first time."""
    for again in range(30):
        status = start()
        if engine == "slurm":
            wait_for_queue()
        if (out / "stream.json").is_file():
            return again
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"{engine}: exit status {status}")
    sys.exit(f"{engine}: no stream after {again + 1} starts")


def wait_for_queue() -> None:
    """Wait until no job runs or can run, and remove those that wait for one that has failed."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        reasons = set(subprocess.check_output([*QUEUE, "%r"], text=True).split())
        if not reasons or (
            "DependencyNeverSatisfied" in reasons and reasons <= {"DependencyNeverSatisfied", "Dependency"}
        ):
            break
        time.sleep(1)
    subprocess.run(["scancel", "--me", "--name", "alma-engines"], check=True)
    while subprocess.check_output([*QUEUE, "%i"]).strip():
        time.sleep(0.5)


def sha256_of(stream: Path) -> tuple[str, int]:
    """Return a sum of the names and sums of all files of a stream, and their number."""
    lines = [
        f"{file_sha256(path)}  {path.relative_to(stream)}\n" for path in sorted(stream.rglob("*")) if path.is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest(), len(lines)


def ways(args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any], bool, str]]:
    """Yield each way: its name, engine, options of that, whether ranks are killed, and why it is skipped."""
    no_slurm = "" if args.partition and shutil.which("sbatch") else "no --partition, or no sbatch"
    no_ray = "" if importlib.util.find_spec("ray") else "ray is not installed"
    no_store = "" if args.store else "no --store"
    slurm = {"partition": args.partition, "time": "1:00:00", "qos": None, "job_name": "alma-engines"}
    for workers in (1, 2):
        yield f"alma-prep-text --workers {workers}", "command", {"workers": workers}, False, ""
    for workers in (1, 2):
        yield f"datatrove, local, {workers} workers", "local", {"workers": workers}, False, ""
    yield "datatrove, local, killed in each stage", "local", {"workers": 2}, True, ""
    yield "datatrove, SLURM", "slurm", slurm, False, no_slurm
    yield "datatrove, SLURM, killed in each stage", "slurm", slurm, True, no_slurm
    yield "datatrove, Ray", "ray", {"mem_per_cpu_gb": 1, "workers": 2}, False, no_ray
    yield "datatrove, Ray, killed in each stage", "ray", {"mem_per_cpu_gb": 1, "workers": 2}, True, no_ray
    yield "datatrove, local, text and work on a store", "local", {"workers": 2}, False, no_store


def main() -> None:
    """Make the streams and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder of files")
    parser.add_argument("--partition", help="of SLURM")
    parser.add_argument("--store", help="address for the text and the work of one way")
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("words", nargs="+", help="behind --: options of alma-prep-text")
    args = parser.parse_args()
    print("| way | started again | seconds | files | sha256 |\n|---|---:|---:|---:|---|", flush=True)
    for name, engine, options, killed, reason in ways(args):
        if args.only not in name:
            continue
        if reason:
            print(f"| {name} | skipped: {reason} | | | |", flush=True)
            continue
        with tempfile.TemporaryDirectory(dir=".", prefix="engines-") as temporary:
            folder = Path(temporary).absolute()
            out, work, text = folder / "stream", str(folder / "work"), str(args.text)
            if name.endswith("store"):
                import fsspec

                text, work = f"{args.store}/{folder.name}/text/", f"{args.store}/{folder.name}/work"
                fsspec.url_to_fs(text)[0].put(f"{args.text}/", text, recursive=True)
            words = [text, "--out", str(out), *args.words]

            def start(engine=engine, words=words, work=work, folder=folder, options=options, killed=killed) -> int:
                process = os.fork()
                if process:
                    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                os.setsid()
                with open(folder / "log", "a") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                status = 1
                try:
                    if engine == "command":
                        status = prep_text([*words, "--workers", str(options["workers"])]) or 0
                    else:
                        run(engine, words, work, folder, options, killed)
                        status = 0
                finally:
                    os._exit(status)

            begin = time.monotonic()
            again = until_there(engine, out, start)
            kills = len([*folder.glob("marks/*")])
            digest, files = sha256_of(out)
            again_or_kills = f"{again}, {kills} kills" if killed else again
            print(
                f"| {name} | {again_or_kills} | {time.monotonic() - begin:.0f} | {files} | {digest[:16]} |", flush=True
            )


if __name__ == "__main__":
    main()
