"""Define, parse and check the options of ``alma-prep-text``."""

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.text.assignment import DEFAULT_NGRAM, Size
from data_prep.text.documents import PERIODS, STANDARD_INPUT
from data_prep.text.workers import default_workers
from fairseq_alma.cli.entry import Parser
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import Options, flag, integer, opt, options_of, real, utf8_path, utf8_word

DEFAULT_FIELD = "text"
FORMATS = ("auto", "text", "lines", "jsonl", "parquet")
FORMS_OF_TEXT = ("text", "lines")  # formats without fields
MAX_INPUTS = 65_535  # The index of an input has 16 bits.
MAX_COUNT = 2**63 - 1  # bytes
HOLDOUT_BYTES = "--holdout-bytes"
"""Option that is not allowed with ``--append``, because the value recorded in the stream still applies."""
AUTO = 0
"""Value of ``--vocab-size auto``: the size of the first mega-batch determines the vocabulary size."""
_EPILOG = """examples:
  alma-prep-text wiki/ --out stream --megabatches 4 --vocab-size 8000
  zcat dump.jsonl.gz | alma-prep-text - --format jsonl --field body --out stream --megabatches 10
  alma-prep-text posts.parquet --by date --period month --out stream
  alma-prep-text 2026.txt.xz --out stream --append --megabatches 1

A size is a number of UTF-8 bytes (N) or a percentage (3%). Repeating a completed command changes nothing."""


def read_size(word: str) -> Size:
    """Parse a size: a number of bytes, or a share (0.03 for ``3%``). Raises ValueError with the valid range."""
    if word.endswith("%"):
        return float(real(0, 50, above=True).read(word[:-1])) / 100
    return int(integer(1, MAX_COUNT).read(word))


def read_vocab_size(word: str) -> int:
    """Parse a vocabulary size; return `AUTO` for ``auto``. Raises ValueError with the valid range."""
    return AUTO if word == "auto" else int(integer(256, 2**24).read(word))


@dataclass(frozen=True)
class PrepOptions(Options):
    """Command-line options and inputs of ``alma-prep-text``."""

    out: Path = opt(MISSING, "folder of the stream", parse=utf8_path, metavar="STREAM")
    megabatches: Optional[int] = opt(
        None, "number of mega-batches of about equal size in bytes", range=integer(1, MAX_MEGABATCHES), metavar="B"
    )
    one_per_input: bool = opt(False, "make one mega-batch for each INPUT, in the given order")
    by: Optional[str] = opt(
        None,
        "make one mega-batch for each value in this field or column, in ascending order of the values",
        parse=utf8_word,
        metavar="NAME",
    )
    period: Optional[str] = opt(
        None, "with dates in the --by field: make one mega-batch for each year, month or day", choices=tuple(PERIODS)
    )
    append: bool = opt(False, "add new mega-batches to the existing stream at --out")
    seed: int = opt(1, "random seed for assigning documents to splits of the stream", range=integer(0, 2**63 - 1))
    preset: Optional[str] = opt(
        None, "paper: by default, test set as large as one mega-batch, validation set 1/10 as large", choices=("paper",)
    )
    valid_bytes: Optional[Size] = opt(
        None, "size of the validation set (default: half of --test-bytes, at most half of its default)", parse=read_size
    )
    test_bytes: Optional[Size] = opt(
        None, "size of the test set (default: 2% of the text, at least 12 kB, at most 1.2 MB and 20%)", parse=read_size
    )
    holdout_bytes: Optional[Size] = opt(
        None,
        "size of the held-out set of each mega-batch, including appended mega-batches (default: none)",
        parse=read_size,
    )
    format: str = opt(
        "auto",
        "input format; text: documents separated by an empty line; lines: one document per line",
        choices=FORMATS,
    )
    field: Optional[str] = opt(
        None, f"field or column with the text (default: {DEFAULT_FIELD})", parse=utf8_word, metavar="NAME"
    )
    keep_duplicates: bool = opt(
        False, "keep documents with the same letters and digits as an earlier document (default: drop them)"
    )
    decontaminate_ngram: int = opt(
        DEFAULT_NGRAM,
        "drop training documents that share N consecutive words with held-out text",
        range=integer(1, 1000),
        metavar="N",
    )
    no_decontaminate: bool = opt(False, "do not apply --decontaminate-ngram; keep all training documents")
    vocab_size: int = opt(
        50_000,
        "vocabulary size of the new tokenizer; auto: derived from the size of the first mega-batch",
        parse=read_vocab_size,
        metavar="V",
    )
    # More text hardly changes the vocabulary, and training needs memory for each distinct word.
    tokenizer_bytes: int = opt(
        180_000_000,
        "train the tokenizer on at most N bytes of the first mega-batch",
        range=integer(1, MAX_COUNT),
    )
    tokenizer: Optional[Path] = opt(
        None,
        "existing tokenizer.json, SentencePiece .model, or tokenizer folder of transformers (default: a new tokenizer)",
        parse=utf8_path,
        metavar="PATH",
    )
    workers: int = opt(
        default_workers(), "number of worker processes; does not change the stream", range=integer(1, 1024)
    )
    inputs: tuple[str, ...] = ()

    @property
    def num_megabatches(self) -> Optional[int]:
        """Return the number of new mega-batches, or None if ``--by`` determines the number."""
        if self.by is not None:
            return None
        return len(self.inputs) if self.one_per_input or self.megabatches is None else self.megabatches

    @property
    def ngram(self) -> Optional[int]:
        """Return the n-gram size for decontamination, in words, or None with ``--no-decontaminate``."""
        return None if self.no_decontaminate else self.decontaminate_ngram

    def determining(self, tokenizer_sha256: Optional[str]) -> dict[str, Any]:
        """Return the options that determine the content of the stream, as a dict from flag to value.

        Args:
            tokenizer_sha256: sha256 of the ``--tokenizer`` file; None: ``--tokenizer`` is not given.
        """
        values = {**vars(self), "megabatches": self.num_megabatches, "field": self.field or DEFAULT_FIELD}
        values |= {"format": None if self.format == "auto" else self.format}
        values |= {"decontaminate_ngram": self.ngram, "tokenizer": tokenizer_sha256}
        names = ["megabatches", "one_per_input", "by", "period", "seed", "format", "field"]
        names += ["keep_duplicates", "decontaminate_ngram"]
        if not self.append:
            names += ["preset", "valid_bytes", "test_bytes", "holdout_bytes", "tokenizer"]
            names += [] if tokenizer_sha256 else ["tokenizer_bytes", "vocab_size"]
        return {flag(name): values[name] for name in names}


def parse_options(argv: Optional[Sequence[str]]) -> PrepOptions:
    """Parse the command line and return the options. Exit with a usage error if options contradict each other."""
    parser = Parser(
        prog="alma-prep-text",
        usage="%(prog)s INPUT… --out STREAM (--megabatches B | --one-per-input | --by NAME) [options]",
        description="Convert raw text to a stream of token files: B mega-batches, a validation set and a test set.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=120),
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="file, folder or pipe with text, JSON lines or Parquet (also .gz, .bz2, .xz, .zst), or - for stdin",
    )
    PrepOptions.add_to(parser)
    args = parser.parse_intermixed_args(argv)
    given = {name: option.flag for name, option in options_of(PrepOptions).items() if vars(args)[name] is not None}
    trains = [given[name] for name in ("vocab_size", "tokenizer_bytes") if name in given]
    sizes = ("tokenizer", "preset", "valid_bytes", "test_bytes", "holdout_bytes")
    fixed = [*trains, *(given[name] for name in sizes if name in given)]
    if args.tokenizer is not None and trains:
        parser.error(
            f"{trains[0]}: this option applies to a new tokenizer, but --tokenizer gives an existing tokenizer; "
            f"remove {trains[0]} or --tokenizer"
        )
    if args.append and fixed:
        parser.error(f"{fixed[0]}: --append uses the setting recorded in the stream; remove {fixed[0]}")
    for name in ("field", "by"):
        if (value := vars(args)[name]) is not None and args.format in FORMS_OF_TEXT:
            parser.error(f"--{name} {value}: --format {args.format} has no fields; remove --{name} or --format")
    if args.period is not None and args.by is None:
        parser.error(f"--period {args.period}: expected --by with a field of dates, found no --by; give --by NAME")
    chosen = [given[name] for name in ("megabatches", "one_per_input", "by") if given.get(name)]
    if len(chosen) > 1 and "--by" in chosen:
        parser.error(f"--by {args.by}: the values of this field determine the mega-batches; remove {chosen[0]}")
    if not chosen:
        parser.error("the number of mega-batches is missing; give --megabatches B, --one-per-input, or --by NAME")
    num_inputs = len(args.inputs)
    if args.one_per_input and args.megabatches not in (None, num_inputs):
        parser.error(
            f"--megabatches {args.megabatches}: --one-per-input makes {num_inputs} mega-batches; remove --megabatches "
            "or --one-per-input"
        )
    if args.one_per_input and num_inputs > MAX_MEGABATCHES:
        parser.error(f"--one-per-input: expected at most {MAX_MEGABATCHES} inputs, found {num_inputs}; remove inputs")
    if num_inputs > MAX_INPUTS:
        parser.error(f"INPUT: expected at most {MAX_INPUTS} inputs, found {num_inputs}; give their folder instead")
    if args.inputs.count(STANDARD_INPUT) > 1:
        parser.error("INPUT -: standard input can be read only once; give - once")
    return PrepOptions.read(args, inputs=tuple(args.inputs))
