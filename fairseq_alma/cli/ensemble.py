"""``alma-ensemble``: write several models as one checkpoint file."""

import argparse
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import printable, refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import Options, operand, opt, real
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.training.average import WRITTEN_ALONE, write_average

EPILOG = """\
The ensemble's probability of a token, or of a class of an image, is the weighted mean of its members' probabilities.
Examples:

  alma-ensemble RUN/stage-003/member-0/checkpoint_last.pt RUN/stage-003/member-1/checkpoint_last.pt --out E.pt
  fairseq-eval-lm STREAM --user-dir fairseq_alma --task alma_lm --path E.pt --gen-subset test --tokens-per-sample 128

  alma-ensemble RUN/stage-000/member-*/checkpoint_last.pt --out E.pt
  fairseq-validate STREAM --user-dir fairseq_alma --task alma_image_classification --path E.pt --valid-subset test \\
    --batch-size 500

Without --embed the members' files must stay unchanged where they are: E.pt has their paths, relative to its own
folder, and their checksums.
"""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(Options):
    """Members of the ensemble, and how they are joined."""

    members: Sequence[Path] = operand("checkpoint of a member, or a run of one", "CKPT", nargs="+")
    out: Path = opt(MISSING, "the checkpoint to write", metavar="FILE")
    weights: Optional[tuple[float, ...]] = opt(
        None,
        "what each member counts, one number of at least 0 for each; divided by their sum (default: all the same)",
        range=real(0),
        metavar="X",
    )
    embed: bool = opt(False, "put the members' weights inside (default: refer to their files)")
    average: bool = WRITTEN_ALONE
    force: bool = opt(False, "replace FILE if it exists")


def build_parser() -> Parser:
    """Return the command's parser."""
    description = "Write several language models, or several image models, as one checkpoint."
    return Parser.of("alma-ensemble", description, EPILOG, EnsembleOptions, ArrivalOptions)


def _check(parser: argparse.ArgumentParser, arguments: EnsembleOptions) -> None:
    weights = arguments.weights
    if arguments.average and (len(arguments.members) > 1 or weights is not None or arguments.embed):
        parser.error("--average: takes one CKPT, and neither --weights nor --embed")
    if weights is not None:
        shown = " ".join(f"{weight:g}" for weight in weights)
        if len(weights) != len(arguments.members):
            parser.error(f"--weights {shown}: {len(weights)} given, {len(arguments.members)} members; one for each")
        if sum(weights) == 0:
            parser.error(f"--weights {shown}: at least one must be greater than 0")
    for member in arguments.members:
        refuse_no_file(member, "CKPT", "give runs, or checkpoints that fairseq-train wrote")
    refuse_existing(arguments.out, arguments.force)


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = build_parser()
    given = parser.parse_intermixed_args(argv)
    arguments = EnsembleOptions.read(given)
    arguments = replace(arguments, members=[find_model(member, given.arrival) for member in arguments.members])
    _check(parser, arguments)
    # These import torch, which takes seconds; --help and usage errors need none of it.
    from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
    from fairseq_alma.checkpoints.ensemble_file import join_checkpoints

    if arguments.average:
        write_average(arguments.members[0], arguments.out, arguments.force)
        print(f"{printable(str(arguments.out))}: the average of {printable(str(arguments.members[0]))}")
        return 0
    weights = arguments.weights or [1.0] * len(arguments.members)
    ensemble = join_checkpoints(arguments.members, weights, arguments.out, arguments.embed)
    write_checkpoint(ensemble, arguments.out, arguments.force)
    _report(arguments, ensemble["cfg"]["model"]["members"])
    return 0


def _report(arguments: EnsembleOptions, entries: Sequence[dict[str, Any]]) -> None:
    for path, entry in zip(arguments.members, entries, strict=True):
        print(f"{entry['weight']:.4f}  {printable(str(path))}")
    how = "their weights inside" if arguments.embed else "referring to their files"
    size = arguments.out.stat().st_size / 1e6
    print(f"{printable(str(arguments.out))}: an ensemble of {len(entries)}, {how}, {size:,.1f} MB")
