"""``alma-prep-text``: raw text to a stream of mega-batches."""

import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from data_prep.build_folder import publish_additions, publish_stream, refuse_other_command, stream_at
from data_prep.text.options import AUTO, PrepOptions, parse_options
from data_prep.text.steps import (
    Encoded,
    Plan,
    cut_documents,
    digest_source,
    encode_piece,
    hash_piece,
    make_plan,
    prepare_encoding,
    sample_piece,
)
from data_prep.text.workers import Function, in_order, with_progress
from data_prep.text.writing import write_stream
from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import DECONTAMINATE, Stream, file_sha256
from fairseq_alma.data.tokens import StreamTokenizer, find_tokenizer_file
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import work_folder
from fairseq_alma.terminal import print_line

SHOWN_GROUPS = 12
MUCH_LEFT_OUT = 0.1  # of the bytes


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and print a summary."""
    options = parse_options(argv)
    start = time.monotonic()
    stream = prepare(options)
    if stream is None:
        print_line(f"{options.out}: the same command was completed before; nothing to do", sys.stdout)
    else:
        _describe(stream, time.monotonic() - start)
        print_line(f"written: {options.out}; next: alma-stream --stream {options.out} --run RUN", sys.stdout)
    return 0


def prepare(options: PrepOptions) -> Optional[Stream]:
    """Carry out one command.

    Returns:
        The stream, or None if the same command was completed before.

    Raises:
        AlmaError: the input, the options or what is at ``--out`` do not allow it.
    """
    stream_to_make(options)  # what is impossible shows before the input is read
    if options.tokenizer is not None:
        StreamTokenizer(options.tokenizer)
    with work_folder(options.out, "alma-prep-text") as root:
        there = stream_to_make(options)  # as it is under the lock
        folder = tempfile.mkdtemp(dir=root)
        plan = make_plan(options, there, folder, Path(folder), options.workers)
        record = record_of(plan, [*in_order(digest_source, folder, len(plan.sources), plan.num_workers)])
        if there is not None and completed_before(options, there, record):
            return None
        deque(_each_piece(hash_piece, plan, folder, "reading"), maxlen=0)
        cut_documents(folder)
        deque(_each_piece(sample_piece, plan, folder, "sampling"), maxlen=0)
        prepare_encoding(folder)
        encoded = _each_piece(encode_piece, plan, folder, "encoding")
        stream = write_stream(plan, folder, root / "stream", encoded, record)
        plan.refuse_changes()
        (publish_stream if there is None else publish_additions)(root / "stream", stream)
    return stream


def _each_piece(function: Function, plan: Plan, folder: str, title: str) -> Iterator[Any]:
    total = sum(source.stamp[0] for source in plan.sources)
    results = in_order(function, folder, len(plan.pieces), plan.num_workers)
    return with_progress(results, title, total, lambda each: each.bytes_read if isinstance(each, Encoded) else each)


def stream_to_make(options: PrepOptions) -> Optional[Stream]:
    """Return the stream that is there; None where one is to be made."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(f"--out {options.out}: no stream there to append to; leave --append out to make one")
    if there is not None and options.append:
        there.verify([])
    return there


def completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Return whether the stream was made by this command too.

    Raises:
        AlmaError: it was made by a command that differs, and this one does not append.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    advice = "choose another --out, remove the stream, or use --append for what arrived later"
    refuse_other_command(options.out, there.history, record, advice)
    return True


def record_of(plan: Plan, digests: Sequence[str]) -> dict[str, Any]:
    """Describe a command by all that decides its result, with the sha256 of each input file."""
    options = plan.options
    tokenizer = None if options.tokenizer is None else file_sha256(find_tokenizer_file(options.tokenizer))
    inputs = [
        {"argument": each.argument, "name": each.name, "format": each.form, "size": each.stamp[0], "sha256": digest}
        for each, digest in zip(plan.sources, digests, strict=True)
    ]
    command = "append" if options.append else "create"
    return {"command": command, "options": options.determining(tokenizer), "inputs": inputs}


def _describe(stream: Stream, seconds: float) -> None:
    """Print what a stream consists of after a command."""
    assert stream.tokenizer is not None
    print(f"{'split':<22}{'documents':>12}{'bytes':>16}{'words':>15}{'tokens':>15}")
    for split in stream.splits:
        print(
            f"{split.name:<22}{split.num_documents:>12,}{split.num_bytes:>16,}{split.num_words:>15,}"
            f"{split.num_tokens:>15,}"
        )
    last = stream.history[-1]
    if groups := last.get("groups"):
        shown = groups if len(groups) <= SHOWN_GROUPS else [*groups[: SHOWN_GROUPS - 2], "…", groups[-1]]
        first = stream.num_megabatches - len(groups)
        print(f"mega-batches {first} to {stream.num_megabatches - 1}: {', '.join(shown)}")
    vocab_size = stream.tokenizer.vocab_size
    print(f"{last['num_duplicates']:,} duplicates dropped, vocabulary size {vocab_size:,}, {seconds:.1f} s")
    if last.get("num_contaminated"):
        size, num_bytes = last["options"][DECONTAMINATE], last["contaminated_bytes"]
        trained = [split for split in stream.splits if split.name in last["splits"] and split.name.endswith("/train")]
        share = num_bytes / (num_bytes + sum(split.num_bytes for split in trained))
        print(
            f"{last['num_contaminated']:,} documents ({num_bytes:,} bytes, {share:.1%} of the training text) left out: "
            f"they share {size} words in a row with what is held out (listed in stream.json)"
        )
        if share > MUCH_LEFT_OUT:
            print(
                f"That is much. Texts of some kinds, such as program code, share {size} words without being copies: "
                f"{DECONTAMINATE} {4 * size} finds longer copies alone, --no-decontaminate none"
            )
    wanted = last["options"].get("--vocab-size")
    if wanted not in (None, AUTO) and wanted != vocab_size:
        print(f"--vocab-size {wanted}: the first mega-batch gives {vocab_size} tokens only")


if __name__ == "__main__":
    sys.exit(main(None))
