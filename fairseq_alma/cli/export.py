"""``alma-export``: a checkpoint as a folder of a stock architecture of transformers."""

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, refuse_no_file, refuse_unwritable
from fairseq_alma.options import operand, opt, utf8_path
from fairseq_alma.runs.lookup import ArrivalOptions, find_model, stream_option
from fairseq_alma.terminal import print_line

EPILOG = """\
The folder is a Qwen3ForCausalLM of transformers 5 or newer, or with experts a Qwen3MoeForCausalLM, and has no code:

  alma-export RUN --out DIR
  python -c "from transformers import pipeline; print(pipeline('text-generation', model='DIR')('The'))"

Ensembles, alma_switch_lm, and experts that were added by split have no such architecture and are refused;
recipes/lm_eval/evaluate.py and load_model of a notebook take every checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ArrivalOptions):
    """What is exported, and where to."""

    path: Path = operand("run, folder of a model with its run in it, or checkpoint, of alma_transformer_lm", "MODEL")
    out: Path = opt(MISSING, "the folder to write; a new one", parse=utf8_path, metavar="DIR")
    stream: Optional[Path] = stream_option(
        "stream whose tokenizer the model knows (default: the one that it was trained on)"
    )


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Write a language model as a folder that transformers reads, with its tokenizer and a model card."
    return Parser.of("alma-export", said, EPILOG, ExportOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-export``."""
    args = ExportOptions.read(build_parser().parse_args(argv))
    path = find_model(args.path, args.arrival)
    refuse_no_file(path, "MODEL", "give a run, or a checkpoint that fairseq-train, alma-grow or alma-import wrote")
    if args.out.exists() or args.out.is_symlink():
        raise AlmaError(f"--out {args.out}: exists already; give the name of a new folder")
    refuse_unwritable(args.out, "--out")
    # This imports torch, which takes seconds; --help and usage errors need none of it.
    from fairseq_alma.exchange.export import export_model

    exported = export_model(path, args.out, args.stream)
    facts = exported.facts
    experts = f"{facts.num_experts} experts, " if facts.num_experts > 1 else ""
    print_line(
        f"{args.out}: {exported.architecture}, {facts.num_params:,} parameters, {experts}{exported.num_tokens:,} "
        f"tokens, {exported.size / 1e6:,.1f} MB",
        sys.stdout,
    )
    return 0
