"""The options of ``alma-prep-text``."""

import argparse
import math
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

from data_prep.text.pieces import PERIODS, Group
from data_prep.text.pool import default_workers
from data_prep.text.source import STANDARD_INPUT
from fairseq_alma.cli.entry import Parser
from fairseq_alma.data.ngrams import DEFAULT_NGRAM
from fairseq_alma.data.stream import DECONTAMINATE
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.options import Options, opt, options_of, real, utf8_path, utf8_word, whole

DEFAULT_VOCAB_SIZE = 50_000
DEFAULT_FIELD = "text"
FORMATS = ("auto", "text", "lines", "jsonl", "parquet", "arrow")
FORMS_OF_TEXT = ("text", "lines")  # in which there are no fields
NUM_BYTES = 256  # byte-level BPE begins with one token per byte
# More text hardly changes the vocabulary, and what training needs in memory grows with the number of distinct words.
DEFAULT_BYTES = {"tokenizers": 180_000_000, "sentencepiece": 18_000_000}
MAX_INPUTS = 65_535  # they are numbered in 16 bits
MAX_COUNT = 2**63 - 1  # of bytes
MAX_WORKERS = 1024
MAX_VOCAB_SIZE = 2**24
_TOKENIZER_TYPES = {"byte-level-bpe": "tokenizers", "sentencepiece": "sentencepiece"}

_EPILOG = """examples:
  alma-prep-text wiki/ --out stream --megabatches 4 --vocab-size 8000
  zcat dump.jsonl.gz | alma-prep-text - --format jsonl --field body --out stream --megabatches 10
  alma-prep-text 2024.txt.xz 2025.txt.xz --one-per-input --out stream
  alma-prep-text posts.parquet --by date --period month --out stream
  alma-prep-text 2026.txt.xz --out stream --append --megabatches 1

Where the same command has been completed before, it does nothing and says so."""

HOLDOUT_BYTES = "--holdout-bytes"
"""Kept in the history of a stream, so that ``--append`` holds out as much."""


Words = Union[int, float]
"""A number of words, or, below 1, a share of all there are."""


def words_of(given: Optional[Words], total: int) -> Optional[int]:
    """Return a number of words out of ``total``; None where none is given."""
    if given is None or isinstance(given, int):
        return given
    return max(1, round(given * total))


AUTO = 0
"""Vocabulary size that is decided by the bytes of the first mega-batch."""


def read_words(word: str) -> Words:
    """Return a number of words, or of ``3%`` the share. Raises ValueError with what is needed."""
    if word.endswith("%"):
        return float(real(0, 50, above=True).read(word[:-1])) / 100
    return int(whole(1, MAX_COUNT).read(word))


def read_vocab_size(word: str) -> int:
    """Return a vocabulary size. Raises ValueError with what is needed."""
    return AUTO if word == "auto" else int(whole(NUM_BYTES, MAX_VOCAB_SIZE).read(word))


def vocab_size_for(num_bytes: int) -> int:
    """Return the vocabulary size for a first mega-batch of so many bytes: near 1.6 times their root, a power of two."""
    return int(min(32_768, max(512, 2 ** round(math.log2(1.6 * math.sqrt(max(1, num_bytes)))))))


@dataclass(frozen=True)
class PrepOptions(Options):
    """One command."""

    out: Path = opt(MISSING, "folder of the stream", parse=utf8_path, metavar="STREAM")
    format: str = opt(
        "auto",
        "text: documents separated by an empty line; lines: one document per line; jsonl: one JSON object per line; "
        "arrow: as save_to_disk of datasets writes; auto: jsonl, parquet or arrow where the file's name or content "
        "says so, else text",
        choices=FORMATS,
    )
    field: Optional[str] = opt(
        None,
        f"field (jsonl) or column (parquet, arrow) that holds the text (default: {DEFAULT_FIELD})",
        parse=utf8_word,
        metavar="NAME",
    )
    keep_duplicates: bool = opt(
        False, "keep documents whose text occurred before (default: the first one is kept, the others are counted)"
    )
    decontaminate_ngram: int = opt(
        DEFAULT_NGRAM,
        "leave out of the mega-batches every document that shares N words in a row with the validation or the test "
        "set, by --append too; stream.json counts and names them",
        range=whole(1, 1000),
        metavar="N",
    )
    no_decontaminate: bool = opt(False, "keep what shares words with the validation or the test set")
    megabatches: Optional[int] = opt(
        None,
        "number of mega-batches, equal in bytes to within 1 % or one document; with --append of new ones",
        range=whole(1, MAX_MEGABATCHES),
        metavar="B",
    )
    one_per_input: bool = opt(
        False, "each INPUT is a mega-batch, in the order given, instead of dealing all documents at random"
    )
    by: Optional[str] = opt(
        None,
        "each value of this field (jsonl) or column (parquet, arrow) is a mega-batch, in their order; validation and "
        "test set are drawn from all of them, and --append takes values that are new",
        parse=utf8_word,
        metavar="NAME",
    )
    period: Optional[str] = opt(
        None, "with --by: each year, month or day of its dates, instead of each value", choices=tuple(PERIODS)
    )
    seed: int = opt(1, "decides who goes where", range=whole(0, 2**63 - 1))
    preset: Optional[str] = opt(
        None,
        "paper: a test set as large as a mega-batch and a validation set of a tenth of one, as in the paper",
        choices=("paper",),
    )
    valid_bytes: Optional[Words] = opt(
        None,
        "size of the validation set in bytes of UTF-8, or as 3% of them (default: half of the test set)",
        parse=read_words,
    )
    test_bytes: Optional[Words] = opt(
        None,
        "size of the test set in bytes of UTF-8, or as 5% of them (default: 2% of them, 12 kB to 1.2 MB)",
        parse=read_words,
    )
    holdout_bytes: Optional[Words] = opt(
        None,
        "hold N bytes, or N% of them, out of each mega-batch, never to be trained on, to tell what a model knows of it "
        "from what it has memorised (alma-stream --matrix); --append does the same (default: none)",
        parse=read_words,
    )
    append: bool = opt(
        False,
        "deal the input into new mega-batches of the stream that is there, with its tokenizer; documents that the "
        "stream has already, in whatever set, count as duplicates",
    )
    vocab_size: Optional[int] = opt(
        None,
        f"vocabulary size of the tokenizer to train, in tokens (default: {DEFAULT_VOCAB_SIZE}; at least {NUM_BYTES}, "
        "one per byte); auto: by the bytes of the first mega-batch",
        parse=read_vocab_size,
        metavar="V",
    )
    tokenizer_type: Optional[str] = opt(
        None, "what to train on the first mega-batch (default: byte-level-bpe)", choices=tuple(_TOKENIZER_TYPES)
    )
    tokenizer_bytes: Optional[int] = opt(
        None,
        "train on at most N bytes of the first mega-batch, documents drawn at random (default: "
        f"{DEFAULT_BYTES['tokenizers']}, for sentencepiece {DEFAULT_BYTES['sentencepiece']})",
        range=whole(1, MAX_COUNT),
    )
    tokenizer: Optional[Path] = opt(
        None,
        "use this tokenizer.json or sentencepiece .model (or the one in this folder) instead of training",
        parse=utf8_path,
        metavar="PATH",
    )
    workers: int = opt(
        default_workers(),
        "worker processes, about 100 MB each; the result does not depend on it (default: the number of cores that may "
        f"be used, here {default_workers()})",
        range=whole(1, MAX_WORKERS),
    )
    inputs: tuple[str, ...] = ()

    @property
    def is_given_apart(self) -> bool:
        """Whether it is given which document is in which mega-batch, instead of dealt."""
        return self.one_per_input or self.by is not None

    @property
    def group(self) -> Optional[Group]:
        """What puts documents into mega-batches, with ``--by``."""
        return None if self.by is None else Group(self.by, self.period)

    @property
    def num_megabatches(self) -> Optional[int]:
        """Number of mega-batches that the command makes; None: as many as ``--by`` finds."""
        if self.by is not None:
            return None
        return len(self.inputs) if self.one_per_input or self.megabatches is None else self.megabatches

    @property
    def form(self) -> Optional[str]:
        """How documents stand in all inputs; None: each says so itself."""
        return None if self.format == "auto" else self.format

    @property
    def text_field(self) -> str:
        """Field or column that holds the text."""
        return DEFAULT_FIELD if self.field is None else self.field

    @property
    def ngram(self) -> Optional[int]:
        """Words in a row that training text may not share with what is held out; None: it may share all."""
        return None if self.no_decontaminate else self.decontaminate_ngram

    @property
    def training(self) -> tuple[str, int, int]:
        """What tokenizer to train, on how many words at most, and its vocabulary size."""
        kind = _TOKENIZER_TYPES[self.tokenizer_type or "byte-level-bpe"]
        vocab_size = DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size
        return kind, self.tokenizer_bytes or DEFAULT_BYTES[kind], vocab_size

    def that_decide(self, tokenizer_sha256: Optional[str]) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags.

        Args:
            tokenizer_sha256: content of the tokenizer given with ``--tokenizer``, which matters rather than its path.
        """
        dealing = {
            "--megabatches": self.num_megabatches,
            "--one-per-input": self.one_per_input,
            "--seed": self.seed,
            "--format": self.form,
            "--field": self.text_field,
            "--keep-duplicates": self.keep_duplicates,
            DECONTAMINATE: self.ngram,
        }
        if self.by is not None:
            dealing |= {"--by": self.by, "--period": self.period}
        if self.append:
            return dealing
        held_out = {"--preset": self.preset, "--valid-bytes": self.valid_bytes, "--test-bytes": self.test_bytes}
        if self.holdout_bytes is not None:
            held_out[HOLDOUT_BYTES] = self.holdout_bytes
        if tokenizer_sha256 is not None:
            return {**dealing, **held_out, "--tokenizer": tokenizer_sha256}
        training = zip(("--tokenizer-type", "--tokenizer-bytes", "--vocab-size"), self.training, strict=True)
        return {**dealing, **held_out, "--tokenizer": None, **dict(training)}


_GROUPS = {
    "reading": ("format", "field", "keep_duplicates", "decontaminate_ngram", "no_decontaminate"),
    "dealing": (
        "megabatches",
        "one_per_input",
        "by",
        "period",
        "seed",
        "preset",
        "valid_bytes",
        "test_bytes",
        "holdout_bytes",
        "append",
    ),
    "tokenizer": ("vocab_size", "tokenizer_type", "tokenizer_bytes", "tokenizer"),
}


def parse_options(argv: Optional[Sequence[str]]) -> PrepOptions:
    """Read the command line; a usage error ends the program with status 2."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    _check(parser, args)
    return PrepOptions.read(args, inputs=tuple(args.inputs))


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
        "for standard input; a pipe will do, <(command)",
    )
    options = options_of(PrepOptions)
    options["out"].add_to(parser)
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            options[name].add_to(group)
    options["workers"].add_to(parser)
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations that contradict each other."""
    given = {name: option.flag for name, option in options_of(PrepOptions).items() if vars(args)[name] is not None}
    trains = [given[name] for name in ("vocab_size", "tokenizer_type", "tokenizer_bytes") if name in given]
    fixed = [
        given[name] for name in ("tokenizer", "preset", "valid_bytes", "test_bytes", "holdout_bytes") if name in given
    ]
    if args.tokenizer is not None and trains:
        parser.error(f"{trains[0]} is about training a tokenizer, but --tokenizer gives one; leave one of them out")
    if args.append and (trains or fixed):
        parser.error(f"{[*trains, *fixed][0]}: with --append this is what the stream has already; leave it out")
    if args.field is not None and args.format in FORMS_OF_TEXT:
        parser.error(f"--field {args.field}: --format {args.format} has no fields; leave one of them out")
    if args.by is not None and args.format in FORMS_OF_TEXT:
        parser.error(f"--by {args.by}: --format {args.format} has no fields; leave one of them out")
    if args.period is not None and args.by is None:
        parser.error(f"--period {args.period}: of the dates in which field? give --by NAME")
    chosen = [given[name] for name in ("megabatches", "one_per_input", "by") if given.get(name)]
    if len(chosen) > 1 and "--by" in chosen:
        parser.error(f"--by {args.by}: makes a mega-batch of each value; leave {chosen[0]} out")
    if args.megabatches is None and not args.one_per_input and args.by is None:
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
