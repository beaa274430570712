"""``alma-import``: a dense folder of transformers as a checkpoint that can grow."""

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.checkpoints.model_options import DenseOptions, training_flags
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import refuse_existing
from fairseq_alma.options import operand, opt, utf8_path
from fairseq_alma.terminal import tell

EPILOG = """\
From a dense model to a mixture that learns from a stream of text in its own tokens:

  alma-prep-text TEXT --out STREAM --megabatches 4 --tokenizer FOLDER/tokenizer.json
  alma-import FOLDER --out dense.pt --stream STREAM
  alma-grow --path dense.pt --out grown.pt --method split --experts 1 --stream STREAM
  alma-stream --stream STREAM --run RUN --finetune-from-model grown.pt -- OPTIONS THAT alma-import PRINTS …

What cannot be expressed: untied output embeddings, other layer norms than with epsilon 1e-5, attention that is not
scaled by the root of a head's size, rotary or relative positions, other activations than GELU and ReLU.
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(DenseOptions):
    """What a folder becomes."""

    folder: Path = operand(
        "folder with config.json and model.safetensors, or with several such files and their index", "DIR"
    )
    out: Path = opt(MISSING, "the checkpoint to write", metavar="CKPT")
    stream: Optional[Path] = opt(
        None,
        "stream made with the folder's tokenizer (alma-prep-text --tokenizer DIR/tokenizer.json); the checkpoint then "
        "knows its dictionary (default: none is checked)",
        parse=utf8_path,
        metavar="STREAM",
    )
    force: bool = opt(False, "replace CKPT if it exists")


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Convert a folder of transformers with a model of type gpt2 to a checkpoint of alma_switch_lm. No "
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
    checkpoint = import_folder(args.folder, stream, args.every)
    write_checkpoint(checkpoint, args.out, args.force)
    options, rows = checkpoint["cfg"]["model"], len(checkpoint["model"]["decoder.embed_tokens.weight"])
    tell(f"{args.out}: {options['decoder_layers']} layers, {rows:,} tokens, fairseq's four included", sys.stdout)
    tell(f"training that begins with it (--finetune-from-model) needs {training_flags(options)}", sys.stdout)
    return 0
