"""``alma-score``: the loss of each document under a model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NoReturn, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, refuse_no_file
from fairseq_alma.files import open_atomically, refuse_existing
from fairseq_alma.options import operand, opt, utf8_path, whole
from fairseq_alma.runs.lookup import MODEL_HELP, ArrivalOptions, find_model, stream_option

EPILOG = """\
One JSON line for each: its number, its "id" if it has one, num_tokens and num_bytes of its text, bits (sum over the
tokens of the text), end_bits (of the document's end), bits_per_token (both, over tokens and end: what fairseq-eval-lm
counts, whose windows --joined gives) and bits_per_byte (of the text alone: what lm_eval counts).

  alma-score RUN documents.jsonl --out losses.jsonl
"""


@dataclass(frozen=True)
class ScoreOptions(ArrivalOptions):
    """What is scored, and how."""

    model: Path = operand(MODEL_HELP, "MODEL", parse=utf8_path)
    input: Optional[Path] = operand("JSON lines (default: standard input)", "INPUT", nargs="?")
    field: str = opt("text", "key of the text", metavar="KEY")
    out: Optional[Path] = opt(None, "file to write (default: standard output)", metavar="FILE")
    stream: Optional[Path] = stream_option()
    window: int = opt(0, "tokens of a window, context included (default: as many as the model takes)", range=whole(1))
    context_window: int = opt(
        0, "tokens of context before each window, which do not count: a sliding window", range=whole(0)
    )
    joined: bool = opt(False, "cut windows out of all documents one behind the other, as fairseq-eval-lm does")
    batch_size: int = opt(16, "windows at a time", range=whole(1))
    force: bool = opt(False, "replace FILE if it exists")


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Print the loss of each document of a file of JSON lines, in bits."
    return Parser.of("alma-score", said, EPILOG, ScoreOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-score``."""
    args = ScoreOptions.read(build_parser().parse_args(argv))
    if args.input is not None:
        if not args.input.exists():
            raise AlmaError(f"{args.input}: no such file; give JSON lines, or leave it out for standard input")
        refuse_no_file(args.input, "INPUT", "give a file of JSON lines")
    if args.out is not None:
        refuse_existing(args.out, args.force)
    # These import torch, which takes seconds; --help and usage errors need none of it.
    from fairseq_alma.exchange.load_model import load_model

    loaded = load_model(find_model(args.model, args.arrival), args.stream)
    window = args.window or loaded.longest
    if window > loaded.longest:
        raise AlmaError(f"--window {window}: the model takes {loaded.longest} tokens at most; give that or less")
    if args.context_window >= window:
        raise AlmaError(f"--context-window {args.context_window}: must be smaller than the window of {window} tokens")
    if args.out is None:
        _write(args, loaded, sys.stdout)
        return 0
    with open_atomically(args.out, "w", replace=args.force) as file:
        _write(args, loaded, file)
    return 0


def _write(args: ScoreOptions, loaded: Any, file: Any) -> None:
    from fairseq_alma.exchange.load_model import score_texts

    identities: list[dict[str, Any]] = []
    texts = _texts(args, identities)
    scores = score_texts(loaded, texts, args.window, args.context_window, args.batch_size, args.joined)
    for number, score in enumerate(scores):
        record = {"document": number, **identities[number], **score.as_record()}
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _refuse_constant(word: str) -> NoReturn:
    """Refuse what Python takes for JSON and nobody else does: the records here would have it too."""
    raise ValueError(f"{word} found")


def _texts(args: ScoreOptions, identities: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts, and note what each document is called."""
    where = args.input or "standard input"
    with open(args.input, "rb") if args.input else sys.stdin.buffer as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line, parse_constant=_refuse_constant)
                text = document[args.field]
                text.encode()
            except (ValueError, RecursionError) as error:
                raise AlmaError(f"{where}, line {number}: not JSON ({error}); give one object per line") from error
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                raise AlmaError(f"{where}, line {number}: no text under {args.field!r}; give --field") from error
            identities.append({"id": document["id"]} if "id" in document else {})
            yield text
