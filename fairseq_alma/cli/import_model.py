"""``alma-import``: a folder of transformers as a checkpoint, which can be trained, grow, and be exported again."""

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import Options, operand, opt, utf8_path
from fairseq_alma.terminal import print_line

EPILOG = """\
A public model learns from a stream of text in its own tokens, and is exported again:

  alma-prep-text TEXT --out STREAM --megabatches 4 --tokenizer DIR
  alma-import DIR --out CKPT --stream STREAM
  alma-stream --stream STREAM --run RUN --finetune-from-model CKPT
  alma-export RUN --out NEW_DIR

Refused: several experts for each token, scaled rotary positions, sliding windows, biases, activations other than SiLU.
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """What a folder becomes."""

    folder: Path = operand("folder with config.json, tokenizer.json, and model.safetensors or its parts", "DIR")
    out: Path = opt(MISSING, "the checkpoint to write", metavar="CKPT")
    stream: Optional[Path] = opt(
        None,
        "stream made with the folder's tokenizer (alma-prep-text --tokenizer DIR), which the checkpoint then names "
        "(default: none)",
        parse=utf8_path,
        metavar="STREAM",
    )
    force: bool = opt(False, "replace CKPT if it exists")


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Convert a Qwen3 or Qwen3-MoE folder of transformers to a checkpoint of alma_transformer_lm. No "
    return Parser.of("alma-import", f"{said}code of the folder is run.", EPILOG, ImportOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-import``."""
    args = ImportOptions.read(build_parser().parse_args(argv))
    if not args.folder.is_dir():
        raise AlmaError(f"{args.folder}: no such folder; give one that transformers' save_pretrained has written")
    refuse_existing(args.out, args.force)
    # These import torch, which takes seconds; --help and usage errors need none of it.
    from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
    from fairseq_alma.data.stream import Stream
    from fairseq_alma.exchange.import_folder import import_folder

    stream = None if args.stream is None else Stream.open(args.stream)
    if stream is not None and stream.kind != "text":
        raise AlmaError(f"--stream {args.stream}: a stream of {stream.kind}; give one of text")
    checkpoint = import_folder(args.folder, stream)
    write_checkpoint(checkpoint, args.out)
    options, rows = checkpoint["cfg"]["model"], len(checkpoint["model"]["decoder.embed_tokens.weight"])
    print_line(f"{args.out}: {options['decoder_layers']} layers, {rows:,} tokens, fairseq's four included", sys.stdout)
    return 0
