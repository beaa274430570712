"""``alma-stream``: run a whole stream of mega-batches, go on with it, or run one stage of it."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.cli.stream_options import plan_run, read_arguments
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.loop import run_stages, train_member
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.learners.run_display import RunDisplay, describe_stage
from fairseq_alma.learners.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.learners.run_record import describe_run, require_same_run
from fairseq_alma.learners.text_backend import TextBackend
from fairseq_alma.learners.text_commands import TextCommands
from fairseq_alma.learners.train_options import TrainOptions

if TYPE_CHECKING:
    from fairseq_alma.growth.model_facts import ModelFacts

# What run.json says of the options, beside learner and seed.
OPTIONS = (
    "wait",
    "replay",
    "drop_rest",
    "iid",
    "init",
    "num_members",
    "grow_schedule",
    "grow_method",
    "grow_select",
    "save_every",
    "validate",
    "keep_checkpoints",
)


def _open_stream(arguments: argparse.Namespace) -> Stream:
    stream = Stream.open(arguments.stream)
    if stream.kind != "text":
        raise AlmaError(f"--stream {stream.root}: a stream of {stream.kind}; this version trains on streams of text")
    if arguments.megabatches is not None and stream.num_megabatches < arguments.megabatches:
        raise AlmaError(
            f"--stream {stream.root}: {stream.num_megabatches} mega-batches, --megabatches asks for "
            f"{arguments.megabatches}; prepare more text, or give a smaller number"
        )
    return stream


def _begin(folder: RunFolder, arguments: argparse.Namespace, options: TrainOptions, stream: Stream) -> None:
    """Write run.json, or make sure that the one that is there describes the same run."""
    chosen: dict[str, Any] = {name: vars(arguments)[name] for name in OPTIONS}
    record = describe_run(arguments.learner, arguments.seed, chosen, options.as_dict(), stream)
    with folder.lock_run():
        before = folder.read_run()
        if before is None:
            folder.write_run(record)
        elif before != record and not folder.has_begun():
            # A mistyped option must not bind the run to it.
            folder.replace_run(record)
        elif before != record:
            for note in require_same_run(str(folder.root / RUN_RECORD), before, record, stream):
                print(note, file=sys.stderr)


def _print_commands(plans: Sequence[StagePlan], commands: TextCommands, arguments: argparse.Namespace) -> None:
    if arguments.iid is not None:
        print(f"# --iid {arguments.iid}: --max-update and --total-num-update are {arguments.iid} times those given")
    for plan in plans:
        if arguments.stage not in (None, plan.stage.index):
            continue
        chosen = commands.all_of(plan)
        if arguments.member is not None:
            training = plan.training_of(arguments.member)
            chosen = [commands.train(plan, training)] if training is not None else []
        if chosen:
            print(f"# {describe_stage(plan, len(plans))}")
        for each in chosen:
            print(each.shell())


def _describe(path: Path) -> "ModelFacts":
    # Imports torch, which takes seconds; a dry run needs none of it.
    from fairseq_alma.growth.model_facts import describe_checkpoint

    return describe_checkpoint(path)


def _terminate(number: int, frame: Optional[FrameType]) -> None:
    print("terminated; the same command goes on from what is complete", file=sys.stderr)
    raise SystemExit(128 + number)


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser, arguments, options = read_arguments(argv)
    if arguments.dry_run and arguments.megabatches is not None and not arguments.stream.exists():
        plans = plan_run(parser, arguments, arguments.megabatches)
    else:
        stream = _open_stream(arguments)
        plans = plan_run(parser, arguments, stream.num_megabatches)
    folder = RunFolder(arguments.run)
    commands = _commands(arguments, options, folder)
    if arguments.dry_run:
        _print_commands(plans, commands, arguments)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    _begin(folder, arguments, options, stream)
    with RunDisplay(plans, "word", _work(commands.options, stream), arguments.stage, arguments.member) as display:
        backend = TextBackend(commands, display, _describe, stream.words_per_token)
        if arguments.member is not None:
            train_member(folder, plans, arguments.member, backend, display, arguments.stage)
            return 0
        num_run = run_stages(folder, plans, backend, display, arguments.stage, arguments.keep_checkpoints)
    if not num_run:
        print(
            f"{folder.root}: nothing to do, " + ("the run" if arguments.stage is None else "the stage") + " is complete"
        )
    return 0


def _work(options: TrainOptions, stream: Stream) -> Callable[[StagePlan], float]:
    """Return how the trainings of two stages compare in length: --max-update ends them alike, epochs by their data."""
    sizes = [split.num_words for split in stream.splits[: stream.num_megabatches]]
    return lambda plan: 1.0 if options.max_update else sum(sizes[t] for t in plan.stage.megabatches)


def _commands(arguments: argparse.Namespace, options: TrainOptions, folder: RunFolder) -> TextCommands:
    return TextCommands(
        stream=arguments.stream,
        folder=folder,
        options=options if arguments.iid is None else options.lengthened(arguments.iid),
        wait=arguments.iid or arguments.wait,
        replay=arguments.replay,
        save_every=arguments.save_every,
        validate=arguments.validate,
        keep_checkpoints=arguments.keep_checkpoints,
    )
