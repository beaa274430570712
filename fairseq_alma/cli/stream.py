"""``alma-stream``: run a whole stream of mega-batches, go on with it, or run one stage of it."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.loop import run_stages
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.learners.progress import StageReporter, describe_stage
from fairseq_alma.learners.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.learners.run_record import describe_run, require_same_run
from fairseq_alma.learners.schedule import stages
from fairseq_alma.learners.strategy import LEARNERS, LearnerOptions, plan_stages
from fairseq_alma.learners.text_backend import TextBackend
from fairseq_alma.learners.text_commands import TextCommands
from fairseq_alma.learners.train_options import TrainOptions

if TYPE_CHECKING:
    from fairseq_alma.growth.model_facts import ModelFacts

MAX_SEED = 9_999_999

EPILOG = """\
Everything after -- is handed to fairseq-train, and what the evaluation needs of it (--cpu, --fp16, --bf16,
--tokens-per-sample, --batch-size, ...) to fairseq-eval-lm. Example:

  alma-stream --stream STREAM --learner sm --wait 1 --run RUN -- \\
      --arch alma_switch_lm_tiny --num-experts 4 --criterion alma_switch_cross_entropy --cpu \\
      --optimizer adam --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 50 --total-num-update 500 \\
      --max-update 500 --batch-size 16 --tokens-per-sample 128

A killed run goes on with the same command and ends with the same figures. Logs are in RUN/stage-NNN/*.log.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before ``--``."""
    parser = argparse.ArgumentParser(
        prog="alma-stream",
        description="Train on one mega-batch after the other and test after each update (Algorithm 1 of the paper).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="alma-stream --stream STREAM --run RUN [options] -- fairseq-train options",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stream", type=Path, required=True, metavar="DIR", help="the stream, written by alma-prep-text")
    add("--run", type=Path, required=True, metavar="DIR", help="folder of this run; made if it is not there")
    add("--learner", choices=sorted(LEARNERS), default="sm", help="how the model learns (default: %(default)s)")
    add(
        "--wait", type=int, default=1, metavar="W", help="mega-batches gathered before an update (default: %(default)s)"
    )
    add("--replay", action="store_true", help="train on all mega-batches so far, not on the new ones alone")
    add("--drop-rest", action="store_true", help="leave the last mega-batches where fewer than W are left")
    add(
        "--init",
        choices=("previous", "scratch"),
        default="previous",
        help="begin each stage with the weights of the stage before, or with random ones (default: %(default)s)",
    )
    add("--seed", type=int, default=1, metavar="N", help=f"0 to {MAX_SEED:,} (default: %(default)s)")
    add("--stage", type=int, metavar="N", help="run this stage alone, from 0; the one before must be complete")
    add(
        "--megabatches",
        type=int,
        metavar="B",
        help="what the stream must have at least; with it, a dry run needs no stream (default: any number)",
    )
    add("--dry-run", action="store_true", help="print the commands of each stage and run nothing")
    add(
        "--save-every",
        type=int,
        default=500,
        metavar="N",
        help="updates between two checkpoints within a stage: what a kill can cost (default: %(default)s)",
    )
    add(
        "--keep-checkpoints", action="store_true", help="keep all; default: only what a later stage and the report need"
    )
    add("--validate", action="store_true", help="let fairseq-train validate whenever it saves; for its log alone")
    return parser


def _read_arguments(argv: Optional[Sequence[str]]) -> tuple[argparse.ArgumentParser, argparse.Namespace, TrainOptions]:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    if arguments.wait < 1:
        parser.error(f"--wait {arguments.wait}: a number of at least 1 is needed")
    if arguments.megabatches is not None and arguments.megabatches < 1:
        parser.error(f"--megabatches {arguments.megabatches}: a number of at least 1 is needed")
    if arguments.save_every < 1:
        parser.error(f"--save-every {arguments.save_every}: a number of at least 1 is needed")
    if not 0 <= arguments.seed <= MAX_SEED:
        parser.error(f"--seed {arguments.seed}: a number from 0 to {MAX_SEED} is needed")
    try:
        return parser, arguments, TrainOptions(words[cut + 1 :])
    except ValueError as error:
        parser.error(str(error))


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


def _plan(parser: argparse.ArgumentParser, arguments: argparse.Namespace, num_megabatches: int) -> list[StagePlan]:
    planned = stages(num_megabatches, arguments.wait, arguments.replay, arguments.drop_rest)
    if not planned:
        parser.error(
            f"--wait {arguments.wait} --drop-rest: the stream has {num_megabatches} mega-batches, so no stage "
            "is left; give a smaller --wait"
        )
    if arguments.stage is not None and not 0 <= arguments.stage < len(planned):
        parser.error(f"--stage {arguments.stage}: the run has stages 0 to {len(planned) - 1}")
    options = LearnerOptions(seed=arguments.seed, from_previous=arguments.init == "previous")
    return plan_stages(arguments.learner, options, planned)


def _begin(folder: RunFolder, arguments: argparse.Namespace, options: TrainOptions, stream: Stream) -> None:
    """Write run.json, or make sure that the one that is there describes the same run."""
    names = ("wait", "replay", "drop_rest", "init", "save_every", "validate", "keep_checkpoints")
    chosen: dict[str, Any] = {name: vars(arguments)[name] for name in names}
    record = describe_run(arguments.learner, arguments.seed, chosen, options.as_dict(), stream)
    before = folder.read_run()
    if before is None:
        folder.write_run(record)
        return
    if not folder.has_begun():
        # A mistyped option must not bind the run to it.
        folder.replace_run(record)
        return
    for note in require_same_run(str(folder.root / RUN_RECORD), before, record, stream):
        print(note, file=sys.stderr)


def _print_commands(plans: Sequence[StagePlan], commands: TextCommands, only: Optional[int]) -> None:
    for plan in plans:
        if only is None or plan.stage.index == only:
            print(f"# {describe_stage(plan, len(plans))}")
            for each in commands.all_of(plan):
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
    parser, arguments, options = _read_arguments(argv)
    if arguments.dry_run and arguments.megabatches is not None and not arguments.stream.exists():
        plans = _plan(parser, arguments, arguments.megabatches)
    else:
        stream = _open_stream(arguments)
        plans = _plan(parser, arguments, stream.num_megabatches)
    folder = RunFolder(arguments.run)
    commands = TextCommands(
        stream=arguments.stream,
        folder=folder,
        options=options,
        wait=arguments.wait,
        replay=arguments.replay,
        save_every=arguments.save_every,
        validate=arguments.validate,
        keep_checkpoints=arguments.keep_checkpoints,
    )
    if arguments.dry_run:
        _print_commands(plans, commands, arguments.stage)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    _begin(folder, arguments, options, stream)
    backend = TextBackend(commands, len(plans), _describe)
    num_run = run_stages(folder, plans, backend, StageReporter(len(plans)), arguments.stage, arguments.keep_checkpoints)
    if not num_run:
        print(
            f"{folder.root}: nothing to do, " + ("the run" if arguments.stage is None else "the stage") + " is complete"
        )
    return 0
