"""``alma-grow``: add experts to every Switch layer of a checkpoint, or layers to it."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.growth import EXPERT_METHODS
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.terminal import print_line

CHECKPOINT_NEEDED = "give a run, or a checkpoint that fairseq-train or alma-grow wrote"


def parser() -> Parser:
    """Build the command's options."""
    description = (
        "Add experts to every Switch layer of a language model's checkpoint, or layers to it, or both. The result is a "
        "checkpoint that fairseq-train trains further (--finetune-from-model) and fairseq-eval-lm tests."
    )
    return Parser.of("alma-grow", description, None, GrowOptions, ArrivalOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-grow``."""
    options = parser()
    given = options.parse_args(argv)
    args = GrowOptions.read(given)
    args = replace(args, path=str(find_model(Path(args.path), given.arrival)))
    _check(options, args)
    # fairseq takes seconds to import; a wrong option should not wait for it
    from fairseq_alma.text.grow import grow

    for line in grow(args).split("\n"):
        print_line(line, sys.stdout)
    return 0


def _check(options: argparse.ArgumentParser, args: GrowOptions) -> None:
    """Refuse what can be refused from the command line alone."""
    if args.experts is None and args.layers is None:
        options.error("--experts K or --layers N is needed, or both")
    if args.experts is None and args.method is not None:
        options.error(f"--method {args.method}: goes with --experts; layers are added in one way")
    if args.experts is not None and args.method is None:
        options.error(f"--experts {args.experts}: --method is needed, one of {', '.join(EXPERT_METHODS)}")
    if args.noise > 0 and args.method != "copy":
        options.error(f"--noise {args.noise}: goes with --method copy alone")
    if args.optimizer == "share" and args.method != "split":
        options.error(f"--optimizer share: goes with --method split, whose experts share tokens, not {args.method}")
    if args.method == "scratch" and args.select != "loss":
        options.error(f"--select {args.select}: has no meaning with --method scratch, which copies no expert")
    refuse_no_file(Path(args.path), "--path", CHECKPOINT_NEEDED)
    refuse_existing(Path(args.out), args.force)
