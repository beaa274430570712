"""``alma-prep-text``: convert raw text to a stream of mega-batches."""

import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from data_prep.text.options import AUTO, PrepOptions, parse_options
from data_prep.text.steps import Encoded, Plan, Work, write_stream
from data_prep.text.workers import Function, in_order
from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import (
    DECONTAMINATE,
    Stream,
    file_sha256,
    publish_additions,
    publish_stream,
    recorded_name,
    refuse_other_command,
    stream_at,
)
from fairseq_alma.data.tokens import StreamTokenizer, find_tokenizer_file
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import work_folder
from fairseq_alma.terminal import LiveLine, format_duration, print_line

SHOWN_GROUPS = 12
LARGE_SHARE = 0.1  # share of the training text


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Make or extend a stream of text, and print a summary."""
    options = parse_options(argv)
    start = time.monotonic()
    stream = prepare(options)
    if stream is None:
        print_line(f"{options.out}: the same command has already completed; nothing to do", sys.stdout)
    else:
        _describe(stream, time.monotonic() - start)
        print_line(f"written: {options.out}; next: alma-stream --stream {options.out} --run RUN", sys.stdout)
    return 0


def prepare(options: PrepOptions) -> Optional[Stream]:
    """Make or extend a stream. Return the stream, or None if the same command has already completed.

    Raises:
        AlmaError: the input, the options or the files at ``--out`` are invalid.
    """
    existing_stream(options)  # Report errors before the input is read.
    if options.tokenizer is not None:
        StreamTokenizer(options.tokenizer)
    with work_folder(options.out, "alma-prep-text") as root:
        there = existing_stream(options)  # Another process may have changed the stream before this process locked it.
        work = Work(tempfile.mkdtemp(dir=root))
        work.make_plan(there, options, Path(work.folder), options.workers)
        plan = work.plan
        record = record_of(plan, [*in_order(work.digest, len(plan.sources), plan.num_workers)])
        if there is not None and completed_before(options, there, record):
            return None
        deque(_each_piece(plan, work.hash, "reading"), maxlen=0)
        work.assign()
        deque(_each_piece(plan, work.sample, "sampling"), maxlen=0)
        work.prepare()
        stream = write_stream(work, root / "stream", _each_piece(plan, work.encode, "encoding"), record)
        plan.refuse_changes()
        (publish_stream if there is None else publish_additions)(root / "stream", stream)
    return stream


def _each_piece(plan: Plan, function: Function, title: str) -> Iterator[Any]:
    """Yield the results of a step for all pieces, and show progress: share of bytes, MB/s and remaining time."""
    line, start, done = LiveLine(), time.monotonic(), 0
    total = sum(size for size, _ in plan.stamps)
    try:
        for result in in_order(function, len(plan.pieces), plan.num_workers):
            yield result
            done += result.bytes_read if isinstance(result, Encoded) else result
            share, seconds = min(done / max(total, 1), 1.0), max(time.monotonic() - start, 1e-9)
            left = format_duration(seconds / max(share, 1e-9) * (1 - share))
            line.show(f"{title}: {share:.0%}, {done / 1e6 / seconds:,.1f} MB/s, {left} left")
    finally:
        line.clear()
    print_line(f"{title}: {total / 1e6:,.1f} MB, {time.monotonic() - start:.1f} s", sys.stderr)


def existing_stream(options: PrepOptions) -> Optional[Stream]:
    """Return the stream at ``--out``, or None. Raises AlmaError if ``--append`` is given without an intact stream."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(
            f"--out {options.out}: expected a stream for --append, found no stream; correct --out, or remove --append"
        )
    if there is not None and options.append:
        there.verify([])
    return there


def completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Return whether the history of the stream ``there`` contains the command ``record``.

    Raises:
        AlmaError: another command made the stream, and ``--append`` is not given.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    advice = "choose another --out, remove the stream, or add new text with --append"
    refuse_other_command(options.out, there.history, record, advice)
    return True


def record_of(plan: Plan, digests: Sequence[str]) -> dict[str, Any]:
    """Return the history entry of a command: its name, options and input files.

    Args:
        plan: plan of the command.
        digests: sha256 of each input file.
    """
    options = plan.options
    tokenizer = None if options.tokenizer is None else file_sha256(find_tokenizer_file(options.tokenizer))
    inputs = []
    for source, (size, _), digest in zip(plan.sources, plan.stamps, digests, strict=True):
        name = "-" if source.is_copy else recorded_name(source.path)
        entry = {"argument": source.argument, "name": name, "format": source.form, "size": size, "sha256": digest}
        inputs.append(entry)
    command = "append" if options.append else "create"
    return {"command": command, "options": options.determining(tokenizer), "inputs": inputs}


def _describe(stream: Stream, seconds: float) -> None:
    """Print the sizes of all splits, the vocabulary size, and how many documents the last command dropped."""
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
    print(f"{last['num_duplicates']:,} duplicates dropped, vocabulary size {vocab_size:,}, {seconds:.1f} s")
    if last.get("num_contaminated"):
        size, num_bytes = last["options"][DECONTAMINATE], last["contaminated_bytes"]
        trained = [split for split in stream.splits if split.name in last["splits"] and split.name.endswith("/train")]
        share = num_bytes / (num_bytes + sum(split.num_bytes for split in trained))
        print(
            f"{last['num_contaminated']:,} documents ({num_bytes:,} bytes, {share:.1%} of the training text) dropped, "
            f"because they share {size} words in a row with held-out text (see stream.json)"
        )
        if share > LARGE_SHARE:
            print(
                f"warning: a large share of the text was dropped. Program code, for example, can share {size} "
                f"words in a row without being a copy. {DECONTAMINATE} {4 * size} drops only longer copies; "
                "--no-decontaminate keeps all documents."
            )
    requested = last["options"].get("--vocab-size")
    if requested not in (None, AUTO) and requested != vocab_size:
        print(f"--vocab-size {requested}: the first mega-batch is too small, so the vocabulary has {vocab_size} tokens")


if __name__ == "__main__":
    sys.exit(main(None))
