"""``alma-prep-text``: parse the options, and convert raw text to a stream of mega-batches, in worker processes."""

import contextlib
import functools
import multiprocessing
import os
import queue
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import MISSING, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from data_prep.text.assignment import DEFAULT_NGRAM, Size
from data_prep.text.documents import FORMATS, FORMS_OF_TEXT, PERIODS, STANDARD_INPUT
from data_prep.text.steps import Encoded, Plan, Work, make_plan, write_stream
from fairseq_alma.data.stream import (
    Stream,
    canonical_sha256,
    file_sha256,
    publish_stream,
    recorded_name,
    refuse_other_command,
    stream_at,
)
from fairseq_alma.data.tokens import AUTO, StreamTokenizer
from fairseq_alma.errors import AlmaError, refuse_colon
from fairseq_alma.files import MAX_MEGABATCHES, work_folder
from fairseq_alma.options import Options, flag, integer, operand, opt, options_of, real, utf8_path, utf8_word
from fairseq_alma.terminal import LiveLine, Parser, command, format_duration, print_line

DEFAULT_FIELD = "text"
MAX_INPUTS = 65_535  # The index of an input has 16 bits.
MAX_COUNT = 2**63 - 1  # bytes
SHOWN_GROUPS = 12
Function = Callable[[int], Iterator[Any]]  # takes a task number, and yields the results of the task
_BUFFERED_RESULTS = 32  # maximum number of unread results of a worker; each result is for about one MiB of text
# options that describe the whole stream, so that --append uses their recorded values
_FIXED = ("preset", "valid_bytes", "test_bytes", "holdout_bytes")
_EPILOG = """examples:
  alma-prep-text wiki/ --out stream --megabatches 4 --vocab-size 8000
  zcat dump.jsonl.gz | alma-prep-text - --format jsonl --field body --out stream --megabatches 10
  alma-prep-text posts.parquet --by date --period month --out stream
  alma-prep-text 2026.txt.xz --out stream --append --megabatches 1

A size is a number of UTF-8 bytes (N) or a percentage (3%). Repeating a completed command changes nothing."""


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        "auto", "text: documents separated by an empty line; lines, file: a document per line or file", choices=FORMATS
    )
    field: Optional[str] = opt(
        None, f"field or column with the text (default: {DEFAULT_FIELD})", parse=utf8_word, metavar="NAME"
    )
    keep_duplicates: bool = opt(
        False, "keep documents with the same letters and digits as an earlier document (default: drop them)"
    )
    decontaminate_ngram: int = opt(
        DEFAULT_NGRAM,
        "drop training documents that repeat held-out text, by the share of sequences of N words",
        range=integer(1, 1000),
        metavar="N",
    )
    no_decontaminate: bool = opt(False, "do not apply --decontaminate-ngram; keep all training documents")
    vocab_size: int = opt(
        AUTO,
        "vocabulary size of the new tokenizer (default: auto, which depends on the first mega-batch; paper: 50000)",
        parse=read_vocab_size,
        metavar="V",
    )
    # More text hardly changes the vocabulary, and training needs memory for each distinct word.
    tokenizer_bytes: int = opt(
        180_000_000, "train the tokenizer on at most N bytes of the first mega-batch", range=integer(1, MAX_COUNT)
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
    inputs: Sequence[str] = operand(
        "file, folder or pipe with text or JSON lines (also .gz, .bz2, .xz, .zst) or Parquet, or - for stdin",
        "INPUT",
        nargs="+",
        parse=str,
    )
    ignored: Optional[Path] = None  # folder in an input folder whose files are not read; None for ``out``

    @property
    def field_or_default(self) -> str:
        return self.field or DEFAULT_FIELD

    @property
    def ngram(self) -> Optional[int]:
        """Return the n-gram size for decontamination, in words, or None with ``--no-decontaminate``."""
        return None if self.no_decontaminate else self.decontaminate_ngram


def parse_options(argv: Optional[Sequence[str]]) -> PrepOptions:
    """Parse the command line and return the options. Exit with a usage error if options contradict each other."""
    parser = Parser(
        PrepOptions,
        prog="alma-prep-text",
        usage="%(prog)s INPUT… --out STREAM (--megabatches B | --one-per-input | --by NAME) [options]",
        description="Convert raw text to a stream of token files: B mega-batches, a validation set and a test set.",
        epilog=_EPILOG,
    )
    args = parser.parse_intermixed_args(argv)
    given = {name: option.flag for name, option in options_of(PrepOptions).items() if vars(args)[name] is not None}
    trains = [given[name] for name in ("vocab_size", "tokenizer_bytes") if name in given]
    fixed = [*trains, *(given[name] for name in ("tokenizer", *_FIXED) if name in given)]
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
    if args.no_decontaminate and args.decontaminate_ngram is not None:
        parser.error("--no-decontaminate: not allowed with --decontaminate-ngram; remove one of them")
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
    if args.vocab_size is None and args.preset == "paper":
        args.vocab_size = 50_000
    if args.one_per_input:
        args.megabatches = num_inputs
    return PrepOptions.read(args)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Make or extend a stream of text, and print a summary."""
    run(parse_options(argv))


def run(options: PrepOptions) -> None:
    """Make or extend the stream of ``options``, and print a summary.

    Raises:
        AlmaError: the input, the options or the files at ``--out`` are invalid.
    """
    start = time.monotonic()
    refuse_colon(options.out, "--out ")
    existing_stream(options)  # Report errors before the input is read.
    if options.tokenizer is not None:
        StreamTokenizer(options.tokenizer)
    with work_folder(options.out, "alma-prep-text") as root:
        there = existing_stream(options)  # Another process may have changed the stream before this process locked it.
        work = Work(tempfile.mkdtemp(dir=root))
        work.save("plan", make_plan(there, options, Path(work.folder), options.workers))
        plan = work.plan
        record = record_of(plan, [*in_order(work.digest, len(plan.sources), plan.num_workers)])
        if there is not None and completed_before(options, there, record):
            there.verify(split.name for split in there.splits)
            print_line(f"{options.out}: the same command has already completed; nothing to do", sys.stdout)
            return
        deque(_each_piece(plan, work.hash, "reading"), maxlen=0)
        work.assign()
        deque(_each_piece(plan, work.sample, "sampling"), maxlen=0)
        work.prepare()
        deque(_each_piece(plan, work.count, "comparing"), maxlen=0)
        stream = write_stream(work, root / "stream", _each_piece(plan, work.encode, "encoding"), record)
        plan.refuse_changes()
        publish_stream(root / "stream", stream)
    _describe(stream, time.monotonic() - start)
    print_line(
        f"written: {options.out}; next: alma-stream --stream {shlex.quote(str(options.out))} --run RUN", sys.stdout
    )


def _each_piece(plan: Plan, function: Function, title: str) -> Iterator[Any]:
    """Yield the results of a step for all pieces, and show progress: share of bytes, MB/s and remaining time."""
    total, start, done = sum(size for size, _ in plan.stamps), time.monotonic(), 0
    with LiveLine() as line:
        for result in in_order(function, len(plan.pieces), plan.num_workers):
            yield result
            done += result.bytes_read if isinstance(result, Encoded) else result
            share, seconds = min(done / max(total, 1), 1.0), max(time.monotonic() - start, 1e-9)
            left = format_duration(seconds / max(share, 1e-9) * (1 - share))
            line.show(f"{title}: {share:.0%}, {done / 1e6 / seconds:,.1f} MB/s, {left} left")
    print_line(f"{title}: {total / 1e6:,.1f} MB, {time.monotonic() - start:.1f} s", sys.stderr)


def existing_stream(options: PrepOptions) -> Optional[Stream]:
    """Return the stream at ``--out``, or None. Raises AlmaError if ``--append`` is given without an intact stream."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(
            f"--out {options.out}: expected a stream for --append, found no stream; correct --out, or remove --append"
        )
    if there is not None and options.append:
        there.verify(split.name for split in there.splits if not split.name.endswith("/train"))
    return there


def completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Return whether the history of the stream ``there`` contains the command ``record``.

    Raises:
        AlmaError: another command made the stream, and ``--append`` is not given.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    refuse_other_command(
        options.out, there.history, record, "choose another --out, remove the stream, or add new text with --append"
    )
    return True


def record_of(plan: Plan, digests: Sequence[str]) -> dict[str, Any]:
    """Return the history entry of a command: its name, the options that determine the stream, and its input files.

    Args:
        plan: plan of the command.
        digests: sha256 of each input file.
    """
    options = plan.options
    values = {
        "megabatches": options.megabatches,
        "one_per_input": options.one_per_input,
        "by": options.by,
        "period": options.period,
        "seed": options.seed,
        "format": None if options.format == "auto" else options.format,
        "field": options.field_or_default,
        "keep_duplicates": options.keep_duplicates,
        "decontaminate_ngram": options.ngram,
    }
    if not options.append:
        values |= {name: vars(options)[name] for name in _FIXED}
        if options.tokenizer is None:
            values |= {name: vars(options)[name] for name in ("tokenizer", "tokenizer_bytes", "vocab_size")}
        else:
            given = StreamTokenizer(options.tokenizer)
            values["tokenizer"] = canonical_sha256([file_sha256(path) for path in (given.file, *given.companions)])
    inputs = [
        {
            "argument": source.argument,
            "name": "-" if source.is_copy else recorded_name(Path(source.path.name)),
            "format": source.form,
            "size": size,
            "sha256": digest,
        }
        for source, (size, _), digest in zip(plan.sources, plan.stamps, digests, strict=True)
    ]
    return {
        "command": "append" if options.append else "create",
        "options": {flag(name): value for name, value in values.items()},
        "inputs": inputs,
    }


def _describe(stream: Stream, seconds: float) -> None:
    assert stream.tokenizer is not None
    print(f"{'split':<22}{'documents':>12}{'bytes':>16}{'words':>15}{'tokens':>15}")
    for split in stream.splits:
        print(
            f"{split.name:<22}{split.num_documents:>12,}{split.num_bytes:>16,}{split.num_words:>15,}"
            f"{split.num_tokens:>15,}"
        )
    last, vocab_size = stream.history[-1], stream.tokenizer.vocab_size
    if groups := last.get("groups"):
        shown = groups if len(groups) <= SHOWN_GROUPS else [*groups[: SHOWN_GROUPS - 2], "…", groups[-1]]
        first = stream.num_megabatches - len(groups)
        print(f"mega-batches {first} to {stream.num_megabatches - 1}: {', '.join(shown)}")
    print(
        f"{last['num_duplicates']:,} duplicates ({last['duplicate_bytes']:,} bytes) dropped, vocabulary size "
        f"{vocab_size:,}, {seconds:.1f} s"
    )
    if last.get("num_contaminated"):
        num_bytes = last["contaminated_bytes"]
        trained = [split for split in stream.splits if split.name in last["splits"] and split.name.endswith("/train")]
        share = num_bytes / (num_bytes + sum(split.num_bytes for split in trained))
        print(
            f"{last['num_contaminated']:,} documents ({num_bytes:,} bytes, {share:.1%} of the training text) dropped, "
            "because they repeat held-out text (see stream.json)"
        )
        if share > 0.1:
            print(
                "warning: a large share of the text was dropped; stream.json has the repeated words of each document. "
                "--no-decontaminate keeps all documents."
            )
    requested = last["options"].get("--vocab-size")
    if requested not in (None, AUTO) and requested != vocab_size:
        print(f"--vocab-size {requested}: the first mega-batch is too small, so the vocabulary has {vocab_size} tokens")


def in_order(function: Function, num_tasks: int, num_workers: int) -> Iterator[Any]:
    """Run numbered tasks in worker processes, and yield the results in the order of the task numbers.

    Worker w of N runs the tasks w, w + N, w + 2N and so on. A worker sends each result separately, and waits while
    `_BUFFERED_RESULTS` results are unread. So neither a large task nor a fast worker fills the memory. With
    ``ProcessPoolExecutor``, a worker would send all results of a task together. An exception of ``function`` is raised
    again.

    Raises:
        AlmaError: a worker was killed.
    """
    num_workers = min(num_workers, num_tasks)
    if num_workers < 2:
        for number in range(num_tasks):
            yield from function(number)
        return
    context = multiprocessing.get_context("spawn")  # Fork is unsafe while tokenizers runs threads.
    started: list[tuple[Any, Connection]] = []
    before = os.environ.get("PYTHONSAFEPATH", "")
    try:
        os.environ["PYTHONSAFEPATH"] = "1"  # Workers must not import modules from the current directory.
        for worker in range(num_workers):
            connection, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(sender, function, range(worker, num_tasks, num_workers)), daemon=True
            )
            process.start()
            sender.close()
            started.append((process, connection))
        for number in range(num_tasks):
            yield from iter(functools.partial(_receive, started[number % num_workers][1]), None)
    finally:
        os.environ["PYTHONSAFEPATH"] = before
        for process, _ in started:
            process.terminate()
            process.join()


def _receive(connection: Connection) -> Any:
    try:
        result = connection.recv()  # None at the end of a task
    except (EOFError, ConnectionResetError) as error:
        raise AlmaError(
            "--workers: a worker process was killed, possibly out of memory; run the command again with fewer --workers"
        ) from error
    if isinstance(result, BaseException):
        raise result
    return result


def _work(connection: Connection, function: Function, numbers: range) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process handles Ctrl-C.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    results: queue.Queue[Any] = queue.Queue(_BUFFERED_RESULTS)
    threading.Thread(target=_compute, args=(function, numbers, results), daemon=True).start()
    with contextlib.suppress(OSError):  # The main process has exited.
        while True:  # until the main process terminates the workers
            connection.send(results.get())


def _compute(function: Function, numbers: range, results: queue.Queue) -> None:
    try:
        for number in numbers:
            for result in function(number):
                results.put(result)
            results.put(None)
    except BaseException as error:
        results.put(error)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(None))
