"""``alma-export``: a checkpoint as a folder that the rest of the field reads."""

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, refuse_no_file, refuse_unwritable
from fairseq_alma.files import refuse_occupied
from fairseq_alma.options import operand, opt, utf8_path
from fairseq_alma.runs.lookup import ArrivalOptions, find_model, stream_option
from fairseq_alma.terminal import tell

EPILOG = """\
The folder has config.json, model.safetensors, tokenizer.json, generation_config.json, a model card (README.md) and
modeling_alma.py. It needs torch, transformers and safetensors, not this package:

  alma-export RUN --out FOLDER
  python -c "from transformers import pipeline; print(pipeline(model='FOLDER', trust_remote_code=True)('The'))"
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ArrivalOptions):
    """What is exported, and where to."""

    path: Path = operand(
        "run, folder of a model with its run in it, or checkpoint: of alma_switch_lm, alma_umix, or an ensemble",
        "MODEL",
    )
    out: Path = opt(MISSING, "the folder to write; a new one", parse=utf8_path, metavar="DIR")
    stream: Optional[Path] = stream_option(
        "stream whose tokenizer the model knows (default: the one that it was trained on)"
    )


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Write a checkpoint, of one model or an ensemble, as a folder that transformers reads."
    return Parser.of("alma-export", said, EPILOG, ExportOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-export``."""
    args = ExportOptions.read(build_parser().parse_args(argv))
    path = find_model(args.path, args.arrival)
    refuse_no_file(path, "MODEL", "give a run, or a checkpoint that fairseq-train, alma-grow or alma-ensemble wrote")
    if args.out.is_dir() and args.out.samefile("."):
        raise AlmaError(f"--out {args.out}: the folder that you are in, which would be replaced; give a new folder")
    refuse_occupied(args.out, "--out ")
    refuse_unwritable(args.out, "--out")
    # These import torch, which takes seconds; --help and usage errors need none of it.
    from fairseq_alma.exchange.model_folder import export_model

    exported = export_model(path, args.out, args.stream)
    facts = exported.facts
    models = f"{facts.num_members} model{'s' if facts.num_members > 1 else ''}"
    tell(
        f"{args.out}: {models}, {facts.num_params:,} parameters, "
        f"{facts.num_experts} experts, {exported.num_tokens:,} tokens, {exported.size / 1e6:,.1f} MB",
        sys.stdout,
    )
    return 0
