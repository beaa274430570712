"""``alma-stream``: run a whole stream of mega-batches, resume it, or run one stage of it."""

import argparse
import contextlib
import sys
from typing import Optional, Sequence

from fairseq_alma.backends.images.image_job import ImageJob
from fairseq_alma.backends.text.text_job import TextJob
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.stream_parser import learner_options, read_arguments
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.faults import refuse_no_folder
from fairseq_alma.learners.learner import Learner
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.arrival_curves import ArrivalCurves
from fairseq_alma.runs.curve_options import CurveOptions
from fairseq_alma.runs.loop import Run, run_stages, train_member
from fairseq_alma.runs.request import OF_EVERY_RUN, Job, RunRequest
from fairseq_alma.runs.run_display import RunDisplay
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.run_record import describe_run, require_same_run
from fairseq_alma.terminal import tell


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser, arguments, own_words, words = read_arguments(argv)
    stream = _open_stream(arguments)
    kind = "text" if stream is None else stream.kind
    learner, given = learner_options(parser, arguments, kind)
    request = RunRequest.of(arguments, learner, given)
    try:
        learners = {seed: request.build_learner(kind, seed) for seed in request.seeds}
        job: Job = ImageJob(request, own_words, words, stream) if kind == "images" else TextJob(request, words, stream)
        curves = CurveOptions.from_options(job.train_options())
        num_megabatches = arguments.megabatches if stream is None else stream.num_megabatches
        plans = {seed: request.plan(each, kind, num_megabatches) for seed, each in learners.items()}
    except ValueError as error:
        parser.error(str(error))
    if arguments.dry_run:
        for planned in plans.values():
            job.print_plan(planned)
        return 0
    assert stream is not None
    refuse_no_folder(request.run, "--run")
    _run(request, job, learners, plans, stream, curves)
    return 0


def _run(
    request: RunRequest,
    job: Job,
    learners: dict[int, Learner],
    plans: dict[int, list[StagePlan]],
    stream: Stream,
    curves: CurveOptions,
) -> None:
    """Run the plans of every seed, in step."""
    first = plans[request.seeds[0]]
    build_backend = job.prepare(first)
    folders = {seed: request.folder(seed) for seed in learners}
    for seed, learner in learners.items():
        _begin(request, folders[seed], learner, seed, job, stream)
    with contextlib.ExitStack() as displays:
        runs = []
        for seed, planned in plans.items():
            shown = ArrivalCurves(folders[seed], planned, curves.sinks(folders[seed]))
            name = f"seed {seed}, " if len(plans) > 1 else ""
            display = RunDisplay(planned, job.unit, job.work(), request.stage, request.member, shown, name)
            runs.append(Run(folders[seed], planned, displays.enter_context(display)))
        backend = build_backend(runs)
        if request.member is not None:
            train_member(runs[0], request.member, backend, request.stage)
            return
        num_run = run_stages(runs, backend, request.stage, request.keep_checkpoints)
    what = "the run" if request.stage is None else "the stage"
    for run, number in zip(runs, num_run, strict=True):
        if not number:
            tell(f"{run.folder.root}: nothing to do, {what} is complete", sys.stdout)


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


def _begin(request: RunRequest, folder: RunFolder, learner: Learner, seed: int, job: Job, stream: Stream) -> None:
    """Write run.json, or make sure that the one that is there describes the same run."""
    chosen = {name: vars(request)[name] for name in (*OF_EVERY_RUN, *job.recorded)}
    options = {**chosen, **learner.as_record(stream.kind)}
    record = describe_run(learner.name, seed, options, job.train_options(), stream)
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
