"""``alma-grow``: add experts to every Switch layer of a checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser
from fairseq_alma.errors import refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.terminal import tell

CHECKPOINT_NEEDED = "give a checkpoint that fairseq-train or alma-grow wrote"


def parser() -> argparse.ArgumentParser:
    """Build the command's options."""
    options = Parser(
        prog="alma-grow",
        description="Add experts to every Switch layer of a language model's checkpoint. The result is a checkpoint "
        "that fairseq-train trains further (--finetune-from-model) and fairseq-eval-lm tests.",
    )
    GrowOptions.add_to(options)
    return options


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-grow``."""
    options = parser()
    args = GrowOptions.read(options.parse_args(argv))
    _check(options, args)
    # fairseq takes seconds to import; a wrong option should not wait for it
    from fairseq_alma.text.grow import grow

    for line in grow(args).split("\n"):
        tell(line, sys.stdout)
    return 0


def _check(options: argparse.ArgumentParser, args: GrowOptions) -> None:
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
