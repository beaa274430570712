"""The options of ``alma-prep-text``."""

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.text.assignment import Size
from data_prep.text.documents import PERIODS
from data_prep.text.source import STANDARD_INPUT
from data_prep.text.workers import default_workers
from fairseq_alma.cli.entry import Parser
from fairseq_alma.data.ngrams import DEFAULT_NGRAM
from fairseq_alma.data.stream import DECONTAMINATE
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import Options, integer, opt, options_of, real, utf8_path, utf8_word

DEFAULT_VOCAB_SIZE = 50_000
DEFAULT_FIELD = "text"
FORMATS = ("auto", "text", "lines", "jsonl", "parquet", "arrow")
FORMS_OF_TEXT = ("text", "lines")  # in which there are no fields
NUM_BYTES = 256  # byte-level BPE begins with one token per byte
# More text hardly changes the vocabulary, and the memory for training grows with the number of distinct words.
DEFAULT_SAMPLE = {"tokenizers": 180_000_000, "sentencepiece": 18_000_000}
MAX_INPUTS = 65_535  # they are numbered in 16 bits
MAX_COUNT = 2**63 - 1  # of bytes
MAX_WORKERS = 1024
MAX_VOCAB_SIZE = 2**24
HOLDOUT_BYTES = "--holdout-bytes"
"""Kept in the history of a stream, so that ``--append`` holds out as much."""
AUTO = 0
"""Vocabulary size that is chosen by the bytes of the first mega-batch."""
_TOKENIZER_TYPES = {"byte-level-bpe": "tokenizers", "sentencepiece": "sentencepiece"}
_EPILOG = """examples:
  alma-prep-text wiki/ --out stream --megabatches 4 --vocab-size 8000
  zcat dump.jsonl.gz | alma-prep-text - --format jsonl --field body --out stream --megabatches 10
  alma-prep-text posts.parquet --by date --period month --out stream
  alma-prep-text 2026.txt.xz --out stream --append --megabatches 1

Sizes are bytes of UTF-8 (N) or a share of all (3%). A command that was completed before does nothing."""


def read_size(word: str) -> Size:
    """Return a number of bytes, or of ``3%`` the share. Raises ValueError with what is needed."""
    if word.endswith("%"):
        return float(real(0, 50, above=True).read(word[:-1])) / 100
    return int(integer(1, MAX_COUNT).read(word))


def read_vocab_size(word: str) -> int:
    """Return a vocabulary size. Raises ValueError with what is needed."""
    return AUTO if word == "auto" else int(integer(NUM_BYTES, MAX_VOCAB_SIZE).read(word))


@dataclass(frozen=True)
class PrepOptions(Options):
    """One command."""

    out: Path = opt(MISSING, "folder of the stream", parse=utf8_path, metavar="STREAM")
    megabatches: Optional[int] = opt(
        None, "number of mega-batches, equal in bytes", range=integer(1, MAX_MEGABATCHES), metavar="B"
    )
    one_per_input: bool = opt(False, "each INPUT is a mega-batch, in the order given")
    by: Optional[str] = opt(
        None, "each value of this field or column is a mega-batch, in order", parse=utf8_word, metavar="NAME"
    )
    period: Optional[str] = opt(None, "with --by: a period of its dates is a mega-batch", choices=tuple(PERIODS))
    append: bool = opt(False, "add mega-batches of new documents to the stream at --out")
    seed: int = opt(1, "random seed of the assignment to the sets", range=integer(0, 2**63 - 1))
    preset: Optional[str] = opt(
        None, "test set as large as a mega-batch, validation set a tenth of one", choices=("paper",)
    )
    valid_bytes: Optional[Size] = opt(None, "validation set (default: half of the test set)", parse=read_size)
    test_bytes: Optional[Size] = opt(None, "test set (default: 2%, 12 kB to 1.2 MB)", parse=read_size)
    holdout_bytes: Optional[Size] = opt(
        None, "held out of each mega-batch, by --append too, never trained on (default: none)", parse=read_size
    )
    format: str = opt(
        "auto",
        "text: an empty line between documents; lines: one a line; arrow: of datasets' save_to_disk",
        choices=FORMATS,
    )
    field: Optional[str] = opt(
        None, f"field or column that holds the text (default: {DEFAULT_FIELD})", parse=utf8_word, metavar="NAME"
    )
    keep_duplicates: bool = opt(False, "keep documents with the letters of an earlier one (default: drop them)")
    decontaminate_ngram: int = opt(
        DEFAULT_NGRAM,
        "drop training documents that share N words in a row with what is held out",
        range=integer(1, 1000),
        metavar="N",
    )
    no_decontaminate: bool = opt(False, "keep them")
    vocab_size: Optional[int] = opt(
        None,
        f"vocabulary size to train, or auto: by the bytes of the first mega-batch (default: {DEFAULT_VOCAB_SIZE})",
        parse=read_vocab_size,
        metavar="V",
    )
    tokenizer_type: Optional[str] = opt(
        None, "what to train (default: byte-level-bpe)", choices=tuple(_TOKENIZER_TYPES)
    )
    tokenizer_bytes: Optional[int] = opt(
        None, "train on at most N bytes of the first mega-batch (default: 180 MB)", range=integer(1, MAX_COUNT)
    )
    tokenizer: Optional[Path] = opt(
        None,
        "use this tokenizer.json, sentencepiece .model, or transformers tokenizer folder",
        parse=utf8_path,
        metavar="PATH",
    )
    workers: int = opt(default_workers(), "worker processes, which decide nothing", range=integer(1, MAX_WORKERS))
    inputs: tuple[str, ...] = ()

    @property
    def num_megabatches(self) -> Optional[int]:
        """Number of mega-batches that the command makes; None: as many as ``--by`` finds."""
        if self.by is not None:
            return None
        return len(self.inputs) if self.one_per_input or self.megabatches is None else self.megabatches

    @property
    def form(self) -> Optional[str]:
        """Form of the documents in all inputs; None: each input decides."""
        return None if self.format == "auto" else self.format

    @property
    def text_field(self) -> str:
        """Field or column that holds the text."""
        return DEFAULT_FIELD if self.field is None else self.field

    @property
    def ngram(self) -> Optional[int]:
        """Words in a row that training text may not share with what is held out; None: any number."""
        return None if self.no_decontaminate else self.decontaminate_ngram

    @property
    def training(self) -> tuple[str, int, int]:
        """The kind of tokenizer to train, the bytes of its sample at most, and its vocabulary size."""
        kind = _TOKENIZER_TYPES[self.tokenizer_type or "byte-level-bpe"]
        vocab_size = DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size
        return kind, self.tokenizer_bytes or DEFAULT_SAMPLE[kind], vocab_size

    def determining(self, tokenizer_sha256: Optional[str]) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags.

        Args:
            tokenizer_sha256: content of the tokenizer given with ``--tokenizer``, which matters rather than its path.
        """
        dealing = {
            "--megabatches": self.num_megabatches,
            "--one-per-input": self.one_per_input,
            "--by": self.by,
            "--period": self.period,
            "--seed": self.seed,
            "--format": self.form,
            "--field": self.text_field,
            "--keep-duplicates": self.keep_duplicates,
            DECONTAMINATE: self.ngram,
        }
        if self.append:
            return dealing
        sizes = {
            "--preset": self.preset,
            "--valid-bytes": self.valid_bytes,
            "--test-bytes": self.test_bytes,
            HOLDOUT_BYTES: self.holdout_bytes,
        }
        if tokenizer_sha256 is not None:
            return {**dealing, **sizes, "--tokenizer": tokenizer_sha256}
        training = zip(("--tokenizer-type", "--tokenizer-bytes", "--vocab-size"), self.training, strict=True)
        return {**dealing, **sizes, "--tokenizer": None, **dict(training)}


def parse_options(argv: Optional[Sequence[str]]) -> PrepOptions:
    """Read the command line."""
    parser = Parser(
        prog="alma-prep-text",
        usage="%(prog)s INPUT… --out STREAM (--megabatches B | --one-per-input | --by NAME) [options]",
        description="Turn raw text into a stream: B mega-batches, a validation set and a test set of token files.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=120),
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSON lines, Parquet, a datasets folder; plain, .gz, .bz2, .xz, .zst; a folder, a pipe, - for stdin",
    )
    PrepOptions.add_to(parser)
    args = parser.parse_intermixed_args(argv)
    _check(parser, args)
    return PrepOptions.read(args, inputs=tuple(args.inputs))


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations that contradict each other."""
    given = {name: option.flag for name, option in options_of(PrepOptions).items() if vars(args)[name] is not None}
    trains = [given[name] for name in ("vocab_size", "tokenizer_type", "tokenizer_bytes") if name in given]
    sizes = ("tokenizer", "preset", "valid_bytes", "test_bytes", "holdout_bytes")
    fixed = [given[name] for name in sizes if name in given]
    if args.tokenizer is not None and trains:
        parser.error(f"{trains[0]} is about training a tokenizer, but --tokenizer gives one; leave one of them out")
    if args.append and (trains or fixed):
        parser.error(f"{[*trains, *fixed][0]}: with --append this is what the stream has already; leave it out")
    for name in ("field", "by"):
        if vars(args)[name] is not None and args.format in FORMS_OF_TEXT:
            parser.error(f"--{name} {vars(args)[name]}: --format {args.format} has no fields; leave one of them out")
    if args.period is not None and args.by is None:
        parser.error(f"--period {args.period}: of the dates in which field? give --by NAME")
    chosen = [given[name] for name in ("megabatches", "one_per_input", "by") if given.get(name)]
    if len(chosen) > 1 and "--by" in chosen:
        parser.error(f"--by {args.by}: makes a mega-batch of each value; leave {chosen[0]} out")
    if not chosen:
        parser.error("--megabatches B is needed, or --one-per-input, or --by NAME")
    num_inputs = len(args.inputs)
    if args.one_per_input and args.megabatches not in (None, num_inputs):
        parser.error(f"--megabatches {args.megabatches}: --one-per-input makes {num_inputs}; leave it out")
    if args.one_per_input and num_inputs > MAX_MEGABATCHES:
        parser.error(f"--one-per-input: {num_inputs} mega-batches, at most {MAX_MEGABATCHES}; give fewer")
    if num_inputs > MAX_INPUTS:
        parser.error(f"INPUT: {num_inputs} given, at most {MAX_INPUTS}; put them into a folder and give that")
    if args.inputs.count(STANDARD_INPUT) > 1:
        parser.error("INPUT -: standard input can be read only once; give it once")
