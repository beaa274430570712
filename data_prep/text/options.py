"""The options of ``alma-prep-text``."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.option_types import check_seed, positive, utf8
from data_prep.text.deal import MAX_MEGABATCHES
from data_prep.text.pool import default_workers
from data_prep.text.source import STANDARD_INPUT
from data_prep.text.training import DEFAULT_WORDS, NUM_BYTES
from fairseq_alma.cli.parser import Parser
from fairseq_alma.options import utf8_path

DEFAULT_VOCAB_SIZE = 50_000
DEFAULT_FIELD = "text"
FORMS_OF_TEXT = ("text", "lines")  # in which there are no fields
MAX_INPUTS = 65_535  # they are numbered in 16 bits
MAX_WORKERS = 1024
MAX_VOCAB_SIZE = 2**24
_TOKENIZER_TYPES = {"byte-level-bpe": "tokenizers", "sentencepiece": "sentencepiece"}

_EPILOG = """examples:
  alma-prep-text wiki/ --out stream --megabatches 4 --vocab-size 8000
  zcat dump.jsonl.gz | alma-prep-text - --format jsonl --field body --out stream --megabatches 10
  alma-prep-text 2024.txt.xz 2025.txt.xz --one-per-input --out stream
  alma-prep-text 2026.txt.xz --out stream --append --megabatches 1

Where the same command has been completed before, it does nothing and says so."""

HOLDOUT_WORDS = "--holdout-words"
"""Kept in the history of a stream, so that ``--append`` holds out as much."""


@dataclass(frozen=True)
class PrepOptions:
    """One command; see the help texts below for each field."""

    inputs: tuple[str, ...]
    out: Path
    megabatches: int
    seed: int
    form: Optional[str]
    field: Optional[str]
    tokenizer: Optional[Path]
    tokenizer_kind: str
    tokenizer_words: int
    vocab_size: int
    valid_words: Optional[int]
    test_words: Optional[int]
    holdout_words: Optional[int]
    keep_duplicates: bool
    one_per_input: bool
    append: bool
    workers: int

    @property
    def text_field(self) -> str:
        """Field or column that holds the text."""
        return DEFAULT_FIELD if self.field is None else self.field

    def that_decide(self, tokenizer_sha256: Optional[str]) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags.

        Args:
            tokenizer_sha256: content of the tokenizer given with ``--tokenizer``, which matters rather than its path.
        """
        dealing = {
            "--megabatches": self.megabatches,
            "--one-per-input": self.one_per_input,
            "--seed": self.seed,
            "--format": self.form,
            "--field": self.text_field,
            "--keep-duplicates": self.keep_duplicates,
        }
        if self.append:
            return dealing
        held_out = {"--valid-words": self.valid_words, "--test-words": self.test_words}
        if self.holdout_words is not None:  # streams made before there was the option lack it
            held_out[HOLDOUT_WORDS] = self.holdout_words
        if tokenizer_sha256 is not None:
            return {**dealing, **held_out, "--tokenizer": tokenizer_sha256}
        training = {
            "--tokenizer-type": self.tokenizer_kind,
            "--tokenizer-words": self.tokenizer_words,
            "--vocab-size": self.vocab_size,
        }
        return {**dealing, **held_out, "--tokenizer": None, **training}


def parse_options(argv: Optional[Sequence[str]]) -> PrepOptions:
    """Read the command line; a usage error ends the program with status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    kind = _TOKENIZER_TYPES[args.tokenizer_type or "byte-level-bpe"]
    return PrepOptions(
        inputs=tuple(args.inputs),
        out=args.out,
        megabatches=len(args.inputs) if args.one_per_input else args.megabatches,
        seed=args.seed,
        form=None if args.format == "auto" else args.format,
        field=args.field,
        tokenizer=args.tokenizer,
        tokenizer_kind=kind,
        tokenizer_words=args.tokenizer_words or DEFAULT_WORDS[kind],
        vocab_size=args.vocab_size or DEFAULT_VOCAB_SIZE,
        valid_words=args.valid_words,
        test_words=args.test_words,
        holdout_words=args.holdout_words,
        keep_duplicates=args.keep_duplicates,
        one_per_input=args.one_per_input,
        append=args.append,
        workers=args.workers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alma-prep-text",
        description="Turn raw text into a stream: B mega-batches, a validation set and a test set of token files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSON lines, Parquet or Arrow (a folder of datasets' save_to_disk); plain, .gz, .bz2, .xz or .zst; "
        "a folder stands for all files in it (recursively, sorted, hidden ones and the folder of --out left out), - "
        "for standard input; a pipe will do: <(command), and an address that fsspec reads: s3://...",
    )
    parser.add_argument("--out", type=utf8_path, required=True, metavar="STREAM", help="folder of the stream")
    _add_reading_options(parser.add_argument_group("reading"))
    _add_dealing_options(parser.add_argument_group("dealing"))
    _add_tokenizer_options(parser.add_argument_group("tokenizer"))
    parser.add_argument(
        "--workers",
        type=positive,
        default=default_workers(),
        metavar="N",
        help="worker processes, about 100 MB each; the result does not depend on it (default: the number of cores, 8 "
        "at most, here %(default)s)",
    )
    return parser


def _add_reading_options(group: Any) -> None:
    group.add_argument(
        "--format",
        choices=("auto", "text", "lines", "jsonl", "parquet", "arrow"),
        default="auto",
        help="text: documents separated by an empty line; lines: one document per line; jsonl: one JSON object per "
        "line; arrow: as save_to_disk of datasets writes; auto: jsonl, parquet or arrow where the file's name or "
        "content says so, else text (default: %(default)s)",
    )
    group.add_argument(
        "--field",
        type=utf8,
        metavar="NAME",
        help=f"field (jsonl) or column (parquet, arrow) that holds the text (default: {DEFAULT_FIELD})",
    )
    group.add_argument(
        "--keep-duplicates",
        action="store_true",
        help="keep documents whose text occurred before (default: the first one is kept, the others are counted)",
    )


def _add_dealing_options(group: Any) -> None:
    group.add_argument(
        "--megabatches",
        type=positive,
        metavar="B",
        help="number of mega-batches, equal in words to within 1 %% or one document; with --append of new ones",
    )
    group.add_argument(
        "--one-per-input",
        action="store_true",
        help="each INPUT is a mega-batch, in the order given, instead of dealing all documents at random",
    )
    group.add_argument("--seed", type=int, default=1, help="decides who goes where (default: %(default)s)")
    group.add_argument(
        "--valid-words",
        type=positive,
        metavar="N",
        help="size of the validation set in words (default: a tenth of a mega-batch)",
    )
    group.add_argument(
        "--test-words",
        type=positive,
        metavar="N",
        help="size of the test set in words (default: as large as a mega-batch, as in the paper)",
    )
    group.add_argument(
        HOLDOUT_WORDS,
        type=positive,
        metavar="N",
        help="hold N words out of each mega-batch, never to be trained on, to tell what a model knows of it from what "
        "it has memorised (alma-stream --matrix); --append does the same (default: none)",
    )
    group.add_argument(
        "--append",
        action="store_true",
        help="deal the input into new mega-batches of the stream that is there, with its tokenizer; documents that "
        "the stream has already, in whatever set, count as duplicates",
    )


def _add_tokenizer_options(group: Any) -> None:
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="V",
        help=f"vocabulary size of the tokenizer to train, in tokens (default: {DEFAULT_VOCAB_SIZE}; at least "
        f"{NUM_BYTES})",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=tuple(_TOKENIZER_TYPES),
        help="what to train on the first mega-batch (default: byte-level-bpe)",
    )
    group.add_argument(
        "--tokenizer-words",
        type=positive,
        metavar="N",
        help="train on at most N words of the first mega-batch, documents drawn at random "
        f"(default: {DEFAULT_WORDS['tokenizers']}, for sentencepiece {DEFAULT_WORDS['sentencepiece']})",
    )
    group.add_argument(
        "--tokenizer",
        type=utf8_path,
        metavar="PATH",
        help="use this tokenizer.json or sentencepiece .model (or the one in this folder) instead of training",
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations that contradict each other."""
    training = {
        "--vocab-size": args.vocab_size,
        "--tokenizer-type": args.tokenizer_type,
        "--tokenizer-words": args.tokenizer_words,
    }
    fixed = {"--tokenizer": args.tokenizer, "--valid-words": args.valid_words, "--test-words": args.test_words}
    fixed[HOLDOUT_WORDS] = args.holdout_words
    if args.tokenizer is not None:
        for flag in _given(training):
            parser.error(f"{flag} is about training a tokenizer, but --tokenizer gives one; leave one of them out")
    if args.append:
        for flag in _given({**training, **fixed}):
            parser.error(f"{flag}: with --append this is what the stream has already; leave it out")
    if args.field is not None and args.format in FORMS_OF_TEXT:
        parser.error(f"--field {args.field}: --format {args.format} has no fields; leave one of them out")
    num_megabatches = len(args.inputs) if args.one_per_input else args.megabatches
    if num_megabatches is None:
        parser.error("--megabatches B is needed, or --one-per-input")
    if args.one_per_input and args.megabatches not in (None, num_megabatches):
        parser.error(f"--megabatches {args.megabatches}: --one-per-input makes {num_megabatches}; leave it out")
    if num_megabatches > MAX_MEGABATCHES:
        parser.error(f"--megabatches {num_megabatches}: at most {MAX_MEGABATCHES}; give fewer")
    if len(args.inputs) > MAX_INPUTS:
        parser.error(f"INPUT: {len(args.inputs)} given, at most {MAX_INPUTS}; put them into a folder and give that")
    if args.workers > MAX_WORKERS:
        parser.error(f"--workers {args.workers}: at most {MAX_WORKERS}; give fewer")
    if args.inputs.count(STANDARD_INPUT) > 1:
        parser.error("INPUT -: standard input can be read only once; give it once")
    if args.vocab_size is not None and args.vocab_size < NUM_BYTES:
        parser.error(f"--vocab-size {args.vocab_size}: at least {NUM_BYTES}, one per byte; give more")
    if args.vocab_size is not None and args.vocab_size > MAX_VOCAB_SIZE:
        parser.error(f"--vocab-size {args.vocab_size}: at most {MAX_VOCAB_SIZE}; give less")
    check_seed(parser, args.seed)


def _given(flags: dict[str, Any]) -> list[str]:
    return [flag for flag, value in flags.items() if value is not None]
