"""``alma-import``: convert a model folder of Hugging Face transformers to a checkpoint of fairseq."""

import importlib.util
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import Options, operand, opt, utf8_path
from fairseq_alma.terminal import Parser, command, print_line

DESCRIPTION = "Import a Qwen3 or Qwen3-MoE model of Hugging Face transformers as a checkpoint of alma_transformer_lm."
EPILOG = """\
To train a public model on a stream of text with the tokenizer of the model, and export the result:

  alma-prep-text TEXT --out STREAM --megabatches 4 --tokenizer DIR
  alma-import DIR --out CKPT --stream STREAM
  alma-stream --stream STREAM --run RUN --finetune-from-model CKPT
  alma-export RUN --out NEW_DIR

alma-import runs no code from DIR. It does not support several experts per token, RoPE scaling, sliding-window
attention, biases, or activations other than SiLU.
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """Options of ``alma-import``."""

    folder: Path = operand("folder with config.json, tokenizer.json, and model.safetensors (one file or shards)", "DIR")
    out: Path = opt(MISSING, "checkpoint to write", metavar="CKPT")
    stream: Optional[Path] = opt(
        None,
        "stream for further training, made with alma-prep-text --tokenizer DIR (default: none)",
        parse=utf8_path,
        metavar="STREAM",
    )
    force: bool = opt(False, "replace CKPT if it exists")


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-import``."""
    parser = Parser(ImportOptions, prog="alma-import", description=DESCRIPTION, epilog=EPILOG)
    args = ImportOptions.read(parser.parse_args(argv))
    if not args.folder.is_dir():
        raise AlmaError(f"{args.folder}: no such folder; give a folder written by save_pretrained of transformers")
    refuse_existing(args.out, args.force)
    stream = None if args.stream is None else Stream.open(args.stream, "text")
    if importlib.util.find_spec("transformers") is None:
        raise AlmaError("transformers is not installed; run pip install 'fairseq-alma[export]'")
    # These imports load fairseq, which takes seconds.
    from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
    from fairseq_alma.exchange.import_folder import import_folder

    checkpoint = import_folder(args.folder, stream)
    write_checkpoint(checkpoint, args.out)
    layers, rows = checkpoint["cfg"]["model"]["decoder_layers"], len(checkpoint["model"]["decoder.embed_tokens.weight"])
    print_line(f"{args.out}: {layers} layers, vocabulary of {rows:,} tokens (4 are fairseq symbols)", sys.stdout)
