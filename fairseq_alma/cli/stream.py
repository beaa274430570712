"""``alma-stream``: run a whole stream of mega-batches, go on with it, or run one stage of it."""

import argparse
import contextlib
import signal
import sys
from types import FrameType
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.cli.stream_images import ImageJob
from fairseq_alma.cli.stream_options import check_learner, plan_run, read_arguments
from fairseq_alma.cli.stream_text import TextJob
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.arrival_curves import ArrivalCurves
from fairseq_alma.runs.curve_options import CurveOptions
from fairseq_alma.runs.loop import Backend, each_stage, in_step, train_member
from fairseq_alma.runs.run_display import RunDisplay
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.run_record import describe_run, require_same_run
from fairseq_alma.terminal import tell


class Job(Protocol):
    """What differs between text and images.

    Attributes:
        unit: of the data, ``word`` or ``image``.
        recorded: options that run.json names, beside learner and seed.
    """

    unit: str
    recorded: tuple[str, ...]

    def train_options(self) -> dict[str, Any]:
        """Return what run.json says of the options after ``--``."""

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print what the stages that were asked for would do."""

    def check(self) -> None:
        """Raise AlmaError if the options make no model, as far as can be told before anything is written."""

    def work(self) -> Callable[[StagePlan], float]:
        """Return a function that tells how long a stage's training is, in any unit."""

    def backends(self, runs: Sequence[tuple[RunFolder, RunDisplay, Sequence[StagePlan]]]) -> Sequence[Backend]:
        """Return what trains and tests the run of each seed."""


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser, arguments, words = read_arguments(argv)
    stream = _open_stream(arguments)
    kind = "text" if stream is None else stream.kind
    check_learner(parser, arguments, kind)
    job: Job
    if kind == "text":
        job = TextJob(parser, arguments, words, stream)
    else:
        job = ImageJob(parser, arguments, words, stream)
    curves = _curve_options(parser, job)
    num_megabatches = arguments.megabatches if stream is None else stream.num_megabatches
    plans = {seed: plan_run(parser, arguments, num_megabatches, kind, seed) for seed in arguments.seed}
    if arguments.dry_run:
        for planned in plans.values():
            job.print_plan(planned)
        return 0
    assert stream is not None
    signal.signal(signal.SIGTERM, _terminate)
    job.check()
    _run(arguments, job, plans, stream, curves)
    return 0


def _run(
    arguments: argparse.Namespace,
    job: Job,
    plans: Mapping[int, Sequence[StagePlan]],
    stream: Stream,
    curves: CurveOptions,
) -> None:
    """Run the plans of every seed, in step."""
    folders = {seed: _folder_of(arguments, seed) for seed in plans}
    for seed, folder in folders.items():
        _begin(folder, arguments, seed, job, stream)
    with contextlib.ExitStack() as displays:
        runs = []
        for seed, folder in folders.items():
            shown = ArrivalCurves(folder, plans[seed], curves.sinks(folder))
            name = f"seed {seed}, " if len(plans) > 1 else ""
            display = RunDisplay(plans[seed], job.unit, job.work(), arguments.stage, arguments.member, shown, name)
            runs.append((folder, displays.enter_context(display), plans[seed]))
        backends = job.backends(runs)
        if arguments.member is not None:
            folder, display, planned = runs[0]
            train_member(folder, planned, arguments.member, backends[0], display, arguments.stage)
            return
        num_run = in_step(
            [
                each_stage(folder, planned, backend, display, arguments.stage, arguments.keep_checkpoints)
                for (folder, display, planned), backend in zip(runs, backends, strict=True)
            ]
        )
    what = "the run" if arguments.stage is None else "the stage"
    for folder, number in zip(folders.values(), num_run, strict=True):
        if not number:
            tell(f"{folder.root}: nothing to do, {what} is complete", sys.stdout)


def _folder_of(arguments: argparse.Namespace, seed: int) -> RunFolder:
    """Return the folder of a seed's run: what --run says, or where there are several seeds a folder in it."""
    return RunFolder(arguments.run if len(arguments.seed) == 1 else arguments.run / f"seed-{seed}")


def _open_stream(arguments: argparse.Namespace) -> Optional[Stream]:
    """Open the stream; None for a dry run of text before there is one."""
    if arguments.dry_run and arguments.megabatches is not None and not arguments.stream.exists():
        return None
    stream = Stream.open(arguments.stream)
    if arguments.megabatches is not None and stream.num_megabatches < arguments.megabatches:
        raise AlmaError(
            f"--stream {stream.root}: {stream.num_megabatches} mega-batches, --megabatches asks for "
            f"{arguments.megabatches}; prepare more data, or give a smaller number"
        )
    return stream


def _curve_options(parser: argparse.ArgumentParser, job: Job) -> CurveOptions:
    """Return the curves that the user wants to watch."""
    try:
        return CurveOptions.from_options(job.train_options())
    except ValueError as error:
        parser.error(str(error))


def _begin(folder: RunFolder, arguments: argparse.Namespace, seed: int, job: Job, stream: Stream) -> None:
    """Write run.json, or make sure that the one that is there describes the same run."""
    chosen = {name: vars(arguments)[name] for name in job.recorded}
    record = describe_run(arguments.learner, seed, chosen, job.train_options(), stream)
    with folder.lock_run():
        before = folder.read_run()
        if before is None:
            folder.write_run(record)
        elif before != record and not folder.has_begun():
            # A mistyped option must not bind the run to it.
            folder.replace_run(record)
        elif before != record:
            for note in require_same_run(str(folder.root / RUN_RECORD), before, record, stream):
                tell(note, sys.stderr)


def _terminate(number: int, frame: Optional[FrameType]) -> None:
    tell("terminated; the same command resumes from what is complete", sys.stderr)
    raise SystemExit(128 + number)
