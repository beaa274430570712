"""The options of ``alma-stream`` that are its own, in groups; what is wrong with their values is found elsewhere."""

import argparse
from typing import Any

from fairseq_alma.cli.parser import utf8_path
from fairseq_alma.learners.learner import LEARNERS, MAX_SEED
from fairseq_alma.learners.presets import PRESETS

SAVE_EVERY = 500
LEARNERS_FROM = "--learners-from"  # not --user-dir: fairseq's parser looks for that in the command line of any process


def add_run(group: Any) -> None:
    """Add what makes a run: its data, its schedule, what it keeps."""
    add = group.add_argument
    add(
        "--stream",
        type=utf8_path,
        required=True,
        metavar="DIR",
        help="the stream, written by alma-prep-text or alma-prep-images",
    )
    add("--run", type=utf8_path, required=True, metavar="DIR", help="folder of this run; made if it is not there")
    add(
        "--wait", type=int, default=1, metavar="W", help="mega-batches gathered before an update (default: %(default)s)"
    )
    add("--replay", action="store_true", help="train on all mega-batches so far, not on the new ones alone")
    add("--drop-rest", action="store_true", help="leave the last mega-batches where fewer than W are left")
    add(
        "--iid",
        type=int,
        metavar="K",
        help="instead of a stream: one stage on the shuffled union of the first K mega-batches, with K times "
        "--max-update and --total-num-update, to compare with K stages of one mega-batch each",
    )
    add(
        "--finetune-from-model",
        type=utf8_path,
        metavar="CKPT",
        help="text: begin with the weights of this checkpoint where a stage would begin with random ones: the first "
        "stage, and with --init scratch each; after the -- stand the options of its architecture, which alma-import "
        "prints (default: random weights)",
    )
    add(
        "--then-evaluate",
        metavar="COMMAND",
        help="run this shell command after each stage's test; its last line must be a JSON object of figures, such as "
        '{"bits_per_byte": 2.01}, which stage.json and the report have beside the test; in the command {checkpoint} '
        "stands for what was tested, {export} for that as alma-export writes it, removed afterwards; also {stage}, "
        "{arrival}, {run} and {stream}",
    )


def add_training(group: Any) -> None:
    """Add what holds for each of its trainings."""
    add = group.add_argument
    add(
        "--seed",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help=f"0 to {MAX_SEED:,} (default: 1); images: several are trained side by side by some learners, "
        "faster than one after the other, each as a run of its own, RUN/seed-N",
    )
    add(
        "--preset",
        choices=list(PRESETS),
        help="images: fill in what is not given here and after the --: "
        + "; ".join(f"{preset.name}, {preset.help}" for preset in PRESETS.values()),
    )
    add(
        "--save-every",
        type=int,
        metavar="N",
        help=f"text: updates between two checkpoints within a stage: what a kill can cost (default: {SAVE_EVERY}); "
        "images are saved every 20 seconds",
    )
    add(
        "--keep-checkpoints",
        action="store_true",
        help="keep all, and of mixtures on images which expert test images go to after each stage; default: only what "
        "a later stage and the report need",
    )
    add(
        "--validate",
        action="store_true",
        default=None,
        help="text: let fairseq-train validate whenever it saves; for its log alone",
    )
    add(
        "--matrix",
        action="store_true",
        default=None,
        help="text: after each stage, test the held-out slice of every mega-batch (alma-prep-text --holdout-words) and "
        "as much of what it trains on; alma-report tells what is memorised and what is forgotten",
    )
    add(
        LEARNERS_FROM, metavar="PATH", help="a folder or file of Python that registers further learners; imported first"
    )


def add_parts(group: Any) -> None:
    """Add what runs a part of it, or nothing."""
    add = group.add_argument
    add("--stage", type=int, metavar="N", help="run this stage alone, from 0; the one before must be complete")
    add("--dry-run", action="store_true", help="print the commands of each stage and run nothing")
    add(
        "--megabatches",
        type=int,
        metavar="B",
        help="what the stream must have at least; with it, a dry run needs no stream (default: any number)",
    )


def add_processes(group: Any) -> None:
    """Add what spreads it over processes, devices and jobs of a cluster."""
    add = group.add_argument
    of_members = ", ".join(name for name, learner in LEARNERS["images"].items() if learner.trains_members_alone)
    add(
        "--num-procs",
        type=int,
        metavar="N",
        help="text: processes that train a model together, on a GPU each or with --cpu; they share the batches of an "
        "update (--update-freq, a multiple of N), so N changes no figure but by rounding, and the resumed run may have "
        "another (default: 1)",
    )
    add(
        "--jobs",
        type=int,
        metavar="N",
        help=f"{of_members}: train members in N processes at the same time, on "
        "--num-procs GPUs each where there are GPUs; any N gives the same files (images: the same for any N, also 1; "
        "without it all members are trained side by side in one network, equal but for rounding)",
    )
    add(
        "--side-by-side",
        type=int,
        metavar="K",
        help="images: with --jobs or --member, train K members in one network, 0 to K-1, K to 2K-1, ..., which is "
        "faster on a CPU; any --jobs gives the same files, another K other last digits (default: 1)",
    )
    add(
        "--member",
        type=int,
        nargs="+",
        metavar="I",
        help=f"{of_members}: train these members, from 0, in --stage or in all "
        "stages; several calls may run at the same time; a call without --member (images: with --jobs) completes the "
        "stages",
    )
    add(
        "--nodes",
        type=int,
        metavar="K",
        help="text: nodes of a cluster that --num-procs are dealt to, by srun; with --slurm, or within an allocation "
        "(default: 1)",
    )
    add(
        "--slurm",
        nargs="*",
        metavar="OPTION=VALUE",
        help="queue a SLURM job for each stage, and for each member of a stage, with these options of sbatch "
        "(partition=gpu gpus-per-node=8 time=MINUTES ...; default: time=1440); each waits for what it starts from and "
        "resumes when it is queued again; --dry-run prints the scripts; needs pip install 'fairseq-alma[slurm]'",
    )
    add("--progress-to", type=int, metavar="FD", help=argparse.SUPPRESS)  # given by --jobs to the calls that it starts
