"""``alma-export``: convert a checkpoint to a model folder of Hugging Face transformers."""

import importlib.util
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.errors import AlmaError, refuse_no_file
from fairseq_alma.options import operand, opt, utf8_path
from fairseq_alma.runs.lookup import ArrivalOptions, find_model
from fairseq_alma.terminal import Parser, command, print_line

DESCRIPTION = "Export a language model to Hugging Face transformers, with its tokenizer and a model card."
EPILOG = """\
DIR is a model folder for transformers 5 or newer: Qwen3ForCausalLM, or Qwen3MoeForCausalLM for a model with experts.
transformers loads DIR without custom code:

  alma-export RUN --out DIR
  python -c "from transformers import pipeline; print(pipeline('text-generation', model='DIR')('The'))"

Ensembles, alma_switch_lm models and models grown with --method split cannot be exported. To evaluate such models, use
recipes/lm_eval/evaluate.py, or fairseq_alma.load_model in Python.
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ArrivalOptions):
    """Options of ``alma-export``."""

    path: Path = operand("run folder, folder of alma-update, or checkpoint of alma_transformer_lm", "MODEL")
    out: Path = opt(MISSING, "folder of the exported model; must not exist yet", parse=utf8_path, metavar="DIR")
    stream: Optional[Path] = opt(
        None,
        "stream with the tokenizer of the model (default: training stream of the model)",
        parse=utf8_path,
        metavar="STREAM",
    )


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-export``."""
    parser = Parser(ExportOptions, prog="alma-export", description=DESCRIPTION, epilog=EPILOG)
    args = ExportOptions.read(parser.parse_args(argv))
    path = find_model(args.path, args.arrival)
    refuse_no_file(path, "MODEL", "give a run, or a checkpoint of fairseq-train, alma-grow or alma-import")
    if args.out.exists() or args.out.is_symlink():
        raise AlmaError(f"--out {args.out}: expected a new folder, found an existing path; give another name")
    if importlib.util.find_spec("safetensors") is None:
        raise AlmaError("safetensors is not installed; run pip install 'fairseq-alma[export]'")
    from fairseq_alma.exchange.export import export_model  # This import loads fairseq, which takes seconds.

    print_line(export_model(path, args.out, args.stream), sys.stdout)
