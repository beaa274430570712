"""``alma-grow``: add experts to every Switch layer of a checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints.model_options import MAX_EXPERTS
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser
from fairseq_alma.errors import refuse_existing, refuse_no_file
from fairseq_alma.options import InRange, real, whole
from fairseq_alma.terminal import tell
from fairseq_alma.training.option_ranges import RANGES

CHECKPOINT_NEEDED = "give a checkpoint that fairseq-train or alma-grow wrote"
METHOD_HELP = """copy: the expert's weights and gate row are copied, the mixture stays flat (the paper's method for
text; the loss jumps); split: the expert becomes two equal ones under a new gate (the loss stays); scratch: new random
experts"""


def parser() -> argparse.ArgumentParser:
    """Build the command's options."""
    options = Parser(
        prog="alma-grow",
        description="Add experts to every Switch layer of a language model's checkpoint. The result is a checkpoint "
        "that fairseq-train trains further (--finetune-from-model) and fairseq-eval-lm tests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--path", required=True, help="checkpoint to grow: alma_switch_lm, or a dense transformer_lm")
    options.add_argument("--out", required=True, help="checkpoint to write")
    options.add_argument("--method", required=True, choices=("copy", "split", "scratch"), help=METHOD_HELP)
    options.add_argument(
        "--experts",
        required=True,
        type=InRange(whole(1, MAX_EXPERTS)),
        metavar="K",
        help="experts to add to each Switch layer",
    )
    options.add_argument(
        "--select",
        choices=("loss", "usage", "random"),
        default="loss",
        help="which experts: those whose tokens have the largest summed loss on the held-out split, those that most "
        "tokens go to, or any",
    )
    options.add_argument("--stream", help="stream whose held-out split is measured; not needed with --select random")
    options.add_argument("--split", default="valid", help="held-out split; a learner has no access to test")
    options.add_argument(
        "--noise", type=InRange(real(0, 1e6)), default=0.0, help="copy: standard deviation of noise on the gate rows"
    )
    options.add_argument(
        "--optimizer",
        choices=("reset", "copy", "share"),
        default="reset",
        help="optimizer state: none (as --finetune-from-model does anyway), or that of old parameters kept and of "
        "copies copied, for --restore-file or --continue-once; share: Adam's moments of an expert that is split are "
        "those of half of its tokens",
    )
    options.add_argument(
        "--moe-freq",
        type=InRange(RANGES["--moe-freq"]),
        help="dense transformer_lm: every n-th layer gets experts (default: 2)",
    )
    options.add_argument(
        "--batch-size",
        type=InRange(RANGES["--batch-size"]),
        default=16,
        help="sequences per batch of the held-out pass",
    )
    options.add_argument(
        "--tokens-per-sample",
        type=InRange(RANGES["--tokens-per-sample"]),
        help="tokens per sequence; default: as the model was trained",
    )
    options.add_argument(
        "--seed", type=InRange(whole(0, 2**63 - 1)), default=1, help="of new weights, noise and random choice"
    )
    options.add_argument("--cpu", action="store_true", help="measure on the CPU even where a GPU is")
    options.add_argument("--force", action="store_true", help="replace --out if it exists")
    return options


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-grow``."""
    options = parser()
    args = options.parse_args(argv)
    _check(options, args)
    # fairseq takes seconds to import; a wrong option should not wait for it
    from fairseq_alma.text.grow import grow

    for line in grow(args).split("\n"):
        tell(line, sys.stdout)
    return 0


def _check(options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what can be refused from the command line alone."""
    if args.noise > 0 and args.method != "copy":
        options.error(f"--noise {args.noise}: goes with --method copy alone")
    if args.select != "random" and args.method != "scratch" and args.stream is None:
        options.error(f"--stream is missing: --select {args.select} measures the experts on its held-out split")
    if args.optimizer == "share" and args.method != "split":
        options.error(f"--optimizer share: goes with --method split, whose experts share tokens, not {args.method}")
    if args.method == "scratch" and args.select != "loss":
        options.error(f"--select {args.select}: has no meaning with --method scratch, which copies no expert")
    refuse_no_file(Path(args.path), "--path", CHECKPOINT_NEEDED)
    refuse_existing(Path(args.out), args.force)
