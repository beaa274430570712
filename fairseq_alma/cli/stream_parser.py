"""The options of ``alma-stream`` that stand before ``--``."""

import argparse
from pathlib import Path

from fairseq_alma.learners.image_strategy import IMAGE_LEARNERS
from fairseq_alma.learners.strategy import LEARNERS

MAX_SEED = 9_999_999
SAVE_EVERY = 500
GROW_SHARE = 0.25
SIDE_BY_SIDE = ("sm", "ens", "bagging", "gens")
"""Learners whose models of several seeds make one stack: neither growth nor joint training ties them to each other."""

EPILOG = """\
Text: everything after -- is handed to fairseq-train, and what the evaluation needs of it (--cpu, --autocast,
--tokens-per-sample, --batch-size, ...) to fairseq-eval-lm. Example:

  alma-stream --stream STREAM --learner sm --wait 1 --run RUN -- \\
      --arch alma_switch_lm_tiny --num-experts 4 --criterion alma_switch_cross_entropy --cpu \\
      --optimizer adam --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 50 --total-num-update 500 \\
      --max-update 500 --batch-size 16 --tokens-per-sample 128

Images: nothing need stand after --; the paper's settings are the defaults. --arch, --width, --channels, --optimizer,
--lr, --max-epoch, --batch-size, --patience, --gate, ... change them. Example:

  alma-stream --stream STREAM --learner gmoe --wait 10 --grow-every 50 --run RUN -- --width 64 --gate soft

Learners: sm, one model; ens, N models with N seeds; gens, N new models in each stage, the others stay as they are;
gmoe, one model that gets more experts before stages (text: --grow-schedule; images: --grow-every); umix, N models
trained jointly as one. Of images also: moe, a fixed number of experts; bagging, an ensemble on bootstrap samples;
firefly, a VGG network whose layers get more neurons.
A killed run goes on with the same command and ends with the same figures. Logs are in RUN/stage-NNN/*.log.

Behind --, --tensorboard-logdir DIR and --wandb-project NAME draw test and valid figures, parameters and FLOPs over
arrivals while the run goes on (DIR/RUN/arrivals), and for text the curves of each training (DIR/RUN/stage-NNN/...).
TensorBoard comes with the extra [report]; Weights & Biases needs pip install wandb, and a login or WANDB_MODE=offline.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before ``--``."""
    parser = argparse.ArgumentParser(
        prog="alma-stream",
        description="Train on one mega-batch after the other and test after each update (Algorithm 1 of the paper).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="alma-stream --stream STREAM --run RUN [options] [-- fairseq-train options]",
        allow_abbrev=False,
    )
    _add_run(parser)
    _add_learner(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--stream",
        type=Path,
        required=True,
        metavar="DIR",
        help="the stream, written by alma-prep-text or alma-prep-images",
    )
    add("--run", type=Path, required=True, metavar="DIR", help="folder of this run; made if it is not there")
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
        "--seed",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help=f"0 to {MAX_SEED:,} (default: 1); images, {', '.join(SIDE_BY_SIDE)}: several are trained side by side, "
        "faster than one after the other, each as a run of its own, RUN/seed-N",
    )
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
        metavar="N",
        help=f"text: updates between two checkpoints within a stage: what a kill can cost (default: {SAVE_EVERY}); "
        "images are saved every 20 seconds",
    )
    add(
        "--num-procs",
        type=int,
        metavar="N",
        help="text: processes that train a model together, on a GPU each or with --cpu; they share the batches of an "
        "update (--update-freq, a multiple of N), so N changes no figure but by rounding, and the resumed run may have "
        "another (default: 1)",
    )
    add(
        "--keep-checkpoints", action="store_true", help="keep all; default: only what a later stage and the report need"
    )
    add(
        "--validate",
        action="store_true",
        default=None,
        help="text: let fairseq-train validate whenever it saves; for its log alone",
    )


def _add_learner(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--learner",
        choices=sorted({*LEARNERS, *IMAGE_LEARNERS}),
        default="sm",
        help="how the model learns (default: %(default)s)",
    )
    add(
        "--init",
        choices=("previous", "scratch", "fresh"),
        help="begin each stage with the weights of the stage before, or with random ones: scratch, or fresh, as "
        "gens calls it (default: fresh for gens, where previous means the last member; else previous)",
    )
    add(
        "--num-members",
        type=int,
        metavar="N",
        help="ens, bagging, umix: models that predict together (default: 2 for text, 5 for images); gens: new ones in "
        "each stage (default: 1)",
    )
    add(
        "--member",
        type=int,
        metavar="I",
        help="text, ens or gens: train member I alone, from 0, in --stage or in all stages; several calls may run at "
        "the same time; a call without --member completes the stages",
    )
    add(
        "--grow-schedule",
        metavar="E0,E1,...",
        help="text, gmoe: experts in each Switch layer during stage 0, 1, ...; the paper: 4,6,8,12",
    )
    add(
        "--grow-method",
        choices=("copy", "split", "scratch"),
        help="text, gmoe: as alma-grow --method; copy is the paper's, split is smooth (default: copy)",
    )
    add(
        "--grow-select",
        choices=("loss", "usage", "random"),
        help="text, gmoe: which experts are copied or split, as alma-grow --select (default: loss)",
    )
    add(
        "--grow-every",
        type=int,
        metavar="N",
        help="images, gmoe and firefly: grow when N more mega-batches have arrived (default: before each stage)",
    )
    add(
        "--grow-share",
        type=float,
        metavar="X",
        help=f"images, firefly: neurons added by a growth step, as a share of the first size (default: {GROW_SHARE})",
    )
    add(
        "--combine",
        choices=("probabilities", "vote"),
        help="images, ens, bagging and gens: predict with the mean of the members' probabilities, or what most of them "
        "find (default: probabilities)",
    )
