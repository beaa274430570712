"""``alma-ensemble``: write several models as one checkpoint file."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import printable, refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import Options, operand, opt, real
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.training.average import write_average

DESCRIPTION = "Write several language models, or several image models, as one checkpoint."
EPILOG = """\
The ensemble's probability of a token, or of an image's class, is the weighted mean of its members' probabilities.
Without --embed, FILE has the paths (relative to FILE) and checksums of the members' files, so the members' files must
not be moved or changed.

  alma-ensemble RUN/stage-003/member-*/checkpoint_last.pt --out E.pt
  fairseq-eval-lm STREAM --user-dir fairseq_alma --task alma_lm --path E.pt --gen-subset test --tokens-per-sample 128
  fairseq-validate STREAM --user-dir fairseq_alma --task alma_image_classification --path E.pt --valid-subset test \\
    --batch-size 500
"""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(Options):
    """Options of ``alma-ensemble``."""

    members: Sequence[Path] = operand("checkpoint of a member, or the run that trained it", "CKPT", nargs="+")
    out: Path = opt(MISSING, "checkpoint to write", metavar="FILE")
    weights: Optional[tuple[float, ...]] = opt(
        None,
        "weight of each member, at least 0; normalised to a sum of 1 (default: equal weights)",
        range=real(0),
        metavar="X",
    )
    embed: bool = opt(False, "copy the members' weights into FILE (default: write only the paths of their files)")
    average: bool = opt(False, "write the averaged weights (--ema-half-life) of one CKPT as a checkpoint")
    force: bool = opt(False, "replace FILE if it exists")


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``alma-ensemble``."""
    parser = Parser(EnsembleOptions, ArrivalOptions, prog="alma-ensemble", description=DESCRIPTION, epilog=EPILOG)
    given = parser.parse_intermixed_args(argv)
    options = EnsembleOptions.read(given)
    members = [find_model(member, given.arrival) for member in options.members]
    weights, out = options.weights or [1.0] * len(members), options.out
    if options.average and (len(members) > 1 or options.weights is not None or options.embed):
        parser.error("--average requires exactly one CKPT, without --weights and --embed")
    shown = f"--weights {' '.join(f'{weight:g}' for weight in weights)}"
    if len(weights) != len(members):
        parser.error(f"{shown}: {len(weights)} weights for {len(members)} members; give one weight for each member")
    if sum(weights) == 0:
        parser.error(f"{shown}: at least one weight must be greater than 0")
    for member in members:
        refuse_no_file(member, "CKPT", "give runs, or checkpoints of fairseq-train")
    refuse_existing(out, options.force)
    # These imports load torch, which takes seconds and is not needed for --help and usage errors.
    from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
    from fairseq_alma.checkpoints.ensemble_file import join_checkpoints

    if options.average:
        write_average(members[0], out)
        print(f"{printable(str(out))}: averaged weights of {printable(str(members[0]))}")
        return 0
    ensemble = join_checkpoints(members, weights, out, options.embed)
    write_checkpoint(ensemble, out)
    entries = ensemble["cfg"]["model"]["members"]
    for path, entry in zip(members, entries, strict=True):
        print(f"{entry['weight']:.4f}  {printable(str(path))}")
    how = "weights included" if options.embed else "weights in the members' files"
    print(f"{printable(str(out))}: ensemble of {len(entries)} models, {how}, {out.stat().st_size / 1e6:,.1f} MB")
    return 0
