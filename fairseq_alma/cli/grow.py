"""``alma-grow``: add experts or layers to a language model checkpoint."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.errors import refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.growth import EXPERT_METHODS
from fairseq_alma.options import flag
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.terminal import Parser, command, print_line

DESCRIPTION = """\
Add experts to every Switch layer of a language model, or layers to its decoder, or both.
The result is a checkpoint for fairseq-train (--finetune-from-model) and fairseq-eval-lm."""


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-grow``."""
    parser = Parser(GrowOptions, ArrivalOptions, prog="alma-grow", description=DESCRIPTION)
    given = parser.parse_args(argv)
    args = replace(GrowOptions.read(given), path=str(find_model(Path(given.path), given.arrival)))
    if args.experts is None and args.layers is None:
        parser.error("--experts, --layers: both missing; give --experts K, --layers N, or both")
    for name in ("method", "moe_freq", "select", "stream", "split", "noise", "batch_size", "tokens_per_sample"):
        if args.experts is None and (value := vars(given)[name]) is not None:
            parser.error(f"{flag(name)} {value} requires --experts; also give --experts K, or remove {flag(name)}")
    if args.experts is not None and args.method is None:
        parser.error(f"--experts {args.experts}: also give --method, one of {', '.join(EXPERT_METHODS)}")
    is_measured = args.stream is not None or (args.method != "scratch" and args.select != "random")
    for name in () if is_measured else ("split", "batch_size", "tokens_per_sample"):
        if (value := vars(given)[name]) is not None:
            parser.error(f"{flag(name)} {value}: no expert is measured; also give --stream, or remove {flag(name)}")
    if args.noise is not None and args.method != "copy":
        parser.error(f"--noise {args.noise} requires --method copy; give --method copy, or remove --noise")
    if args.optimizer == "share" and args.method != "split":
        parser.error(f"--optimizer share requires --method split, found {args.method}; remove --optimizer")
    if args.method == "scratch" and args.select != "loss":
        parser.error(f"--select {args.select} has no effect with --method scratch; remove --select")
    refuse_no_file(Path(args.path), "--path", "give a run, or a checkpoint of fairseq-train or alma-grow")
    refuse_existing(Path(args.out), args.force)
    from fairseq_alma.text.grow import grow  # This import loads fairseq, which takes seconds.

    for line in grow(args).split("\n"):
        print_line(line, sys.stdout)
