"""``alma-ensemble``: combine several models in one checkpoint file."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import printable, refuse_no_file
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import operand, opt, real
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.terminal import Parser, command

DESCRIPTION = "Combine several language models, or several image models, in one checkpoint."
EPILOG = """\
The ensemble predicts the weighted mean of the members' probabilities of tokens (text) or classes (images).
Without --embed, FILE contains only the paths (relative to the folder of FILE) and checksums of the members'
checkpoints. Do not move or change these checkpoints.

  alma-ensemble RUN/stage-003/member-*/checkpoint_last.pt --out E.pt
  fairseq-eval-lm STREAM --user-dir fairseq_alma --task alma_lm --path E.pt --gen-subset test --tokens-per-sample 128
  fairseq-validate STREAM --user-dir fairseq_alma --task alma_image_classification --path E.pt --valid-subset test \\
    --batch-size 500
"""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(ArrivalOptions):
    """Options of ``alma-ensemble``."""

    members: Sequence[Path] = operand("checkpoint of a member, or the run that trained the member", "CKPT", nargs="+")
    out: Path = opt(MISSING, "checkpoint to write", metavar="FILE")
    weights: Optional[tuple[float, ...]] = opt(
        None,
        "weight of each member, at least 0; normalised to a sum of 1 (default: equal weights)",
        range=real(0),
        metavar="X",
    )
    embed: bool = opt(False, "copy the members' parameters into FILE (default: write only the checkpoints' paths)")
    average: bool = opt(False, "write a checkpoint with the averaged weights (--ema-half-life) of one CKPT")
    force: bool = opt(False, "replace FILE if it exists")


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-ensemble``."""
    parser = Parser(EnsembleOptions, prog="alma-ensemble", description=DESCRIPTION, epilog=EPILOG)
    options = EnsembleOptions.read(parser.parse_intermixed_args(argv))
    members = [find_model(member, options.arrival) for member in options.members]
    last = members[0].with_name(LAST_CHECKPOINT)
    if options.average and options.members[0].is_dir() and last.is_file():
        members[0] = last  # The model of a run may be the average already.
    weights, out = options.weights or [1.0] * len(members), options.out
    if options.average and (len(members) > 1 or options.weights is not None or options.embed):
        parser.error(f"--average requires one CKPT (found {len(members)}); remove other CKPTs, --weights and --embed")
    shown = f"--weights {' '.join(f'{weight:g}' for weight in weights)}"
    if len(weights) != len(members):
        parser.error(f"{shown}: expected {len(members)} weights, found {len(weights)}; give one weight for each member")
    if sum(weights) == 0:
        parser.error(f"{shown}: expected at least one positive weight, found only 0; give a positive weight")
    for member in members:
        refuse_no_file(member, "CKPT", "give runs, or checkpoints of fairseq-train")
    refuse_existing(out, options.force)
    # These imports load torch, which takes seconds and is not needed for --help and usage errors.
    from fairseq_alma.checkpoints.checkpoint_file import write_average, write_checkpoint
    from fairseq_alma.checkpoints.ensemble_file import join_checkpoints

    if options.average:
        write_average(members[0], out)
        print(f"{printable(str(out))}: averaged weights of {printable(str(members[0]))}")
        return
    ensemble = join_checkpoints(members, weights, out, options.embed)
    write_checkpoint(ensemble, out)
    entries = ensemble["cfg"]["model"]["members"]
    for path, entry in zip(members, entries, strict=True):
        print(f"{entry['weight']:.4f}  {printable(str(path))}")
    how = "weights included" if options.embed else "weights in the members' files"
    print(f"{printable(str(out))}: ensemble of {len(entries)} models, {how}, {out.stat().st_size / 1e6:,.1f} MB")
