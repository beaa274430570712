"""``alma-prep-text``: raw text to a stream of mega-batches. Read, deal, train a tokenizer, encode, publish."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.build_folder import BuildFolder, refuse_other_command, stream_at
from data_prep.text.folder import Folder
from data_prep.text.near_copies import require_library
from data_prep.text.options import AUTO, FORMS_OF_TEXT, PrepOptions, parse_options
from data_prep.text.passes import PassProgress, Work, carry_out, unpack
from data_prep.text.pieces import SMALLEST_PIECE, Piece, Source, cut_into_pieces, num_workers_for
from data_prep.text.pool import Workers
from data_prep.text.source import find_sources
from data_prep.text.steps import STEPS, finish, record_of
from fairseq_alma.cli.entry import command
from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.data.ngrams import HELD_OUT
from fairseq_alma.data.stream import DECONTAMINATE, Stream
from fairseq_alma.data.tokenizer import StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import tell

SHOWN_GROUPS = 12
MUCH_LEFT_OUT = 0.1  # of the words
FEW_PACKED = 64
"""Compressed files; where there are more, they keep as many cores busy as they are, and each pass unpacks them."""


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and say what came out."""
    options = parse_options(argv)
    start = time.monotonic()
    stream = prepare(options)
    if stream is None:
        tell(f"{options.out}: this very command has been completed before; nothing to do", sys.stdout)
    else:
        _describe(stream, time.monotonic() - start)
    return 0


def _describe(stream: Stream, seconds: float) -> None:
    """Print what a stream consists of after a command."""
    assert stream.tokenizer is not None
    print(f"{'split':<22}{'documents':>12}{'words':>15}{'tokens':>15}{'bytes of text':>17}")
    for split in stream.splits:
        print(
            f"{split.name:<22}{split.num_documents:>12,}{split.num_words:>15,}{split.num_tokens:>15,}"
            f"{split.num_bytes:>17,}"
        )
    last = stream.history[-1]
    vocab_size = stream.tokenizer.vocab_size
    if "groups" in last:
        first = stream.num_megabatches - len(last["groups"])
        print(f"mega-batches {first} to {stream.num_megabatches - 1}: {', '.join(_abridged(last['groups']))}")
    print(f"{last['num_duplicates']:,} duplicates dropped, vocabulary size {vocab_size:,}, {seconds:.1f} s")
    if near := last.get("near_duplicates"):
        print(
            f"{near['documents']:,} documents ({near['words']:,} words) left out as near-duplicates of others (MinHash)"
        )
    if last.get("num_contaminated"):
        words, size = last["contaminated_words"], last["options"][DECONTAMINATE]
        kept = sum(
            split.num_words for split in stream.splits if split.name in last["splits"] and split.name not in HELD_OUT
        )
        share = words / (words + kept)
        print(
            f"{last['num_contaminated']:,} documents ({words:,} words, {share:.1%} of what was to be trained on) left "
            f"out: they share {size} words in a row with the validation or the test set (stream.json names them)"
        )
        if share > MUCH_LEFT_OUT:
            print(
                f"That is much. Texts of some kinds, such as program code, share {size} words without being copies: "
                f"{DECONTAMINATE} {4 * size} finds longer copies alone, --no-decontaminate none"
            )
    wanted = last["options"].get("--vocab-size")
    if wanted not in (None, AUTO) and wanted != vocab_size:
        print(f"--vocab-size {wanted}: the first mega-batch gives {vocab_size} tokens only")


def _abridged(names: Sequence[str]) -> list[str]:
    return [*names] if len(names) <= SHOWN_GROUPS else [*names[: SHOWN_GROUPS - 2], "…", names[-1]]


def prepare(options: PrepOptions) -> Optional[Stream]:
    """Carry out one command.

    Returns:
        The stream, or None if the same command has been completed before.

    Raises:
        AlmaError: the input, the options or what stands at ``--out`` do not allow it.
    """
    stream_to_make(options)  # what cannot be shows before the input is read
    require_library(options.near_duplicates)
    if options.tokenizer is not None:
        StreamTokenizer(options.tokenizer)  # a broken one shows now, not after the first pass
    with BuildFolder(options.out, "alma-prep-text", keeps=True) as build:
        there = stream_to_make(options)  # as it is under the lock
        sources = find_sources(options.inputs, options.form, options.text_field, build.path, options.out, options.group)
        refuse_unfit(options, sources)
        before = [source.stamp for source in sources]
        with Workers(min(options.workers, num_workers_for(sources))) as workers:
            record = record_of(options, sources, [*workers.map(file_sha256, [source.path for source in sources])])
            if there is not None and completed_before(options, there, record):
                return None
            kept = build.keep({**record, "stream": None if there is None else there.fingerprint})
            pieces = _pieces_of(sources, kept, workers)
            made = kept / "stream"
            work = Work(options, sources, pieces, Folder(str(kept)), Folder(str(made)), there, workers.number)
            if there is not None:
                there.verify([])
            for step in STEPS:
                carry_out(step, work, workers)
            stream = finish(work, record)
        for source, stamp in zip(sources, before, strict=True):
            if source.stamp != stamp:
                raise AlmaError(f"{source.label}: changed while it was being read; give the command again")
        for source in sources:
            if source.is_copy:
                Path(source.path).unlink()
        os.rename(made, build.path)
        if there is None:
            build.publish_stream(stream)
        else:
            build.publish_additions(stream)
    return stream


def _pieces_of(sources: Sequence[Source], kept: Path, workers: Workers) -> list[Piece]:
    """Cut the input into pieces; few compressed files are unpacked first, as each would be one."""
    packed = [number for number, source in enumerate(sources) if source.is_packed and source.size > SMALLEST_PIECE]
    if 0 < len(packed) < FEW_PACKED:
        tasks = [(sources[number], kept / f"unpacked-{number}") for number in packed]
        with PassProgress("unpacking", sum(source.size for source, _ in tasks)) as progress:
            for _ in workers.map(unpack, tasks, progress.update):
                pass
        read = dict(zip(packed, (path for _, path in tasks), strict=True))
        sources = [replace(source, path=read.get(at, source.path)) for at, source in enumerate(sources)]
    return cut_into_pieces(sources)


def stream_to_make(options: PrepOptions) -> Optional[Stream]:
    """Return the stream that is there; None where one is to be made."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(f"--out {options.out}: no stream there to append to; leave --append out to make one")
    return there


def refuse_unfit(options: PrepOptions, sources: Sequence[Source]) -> None:
    """Raise AlmaError if the input is what the command writes, or lacks the fields that options name."""
    out = options.out.resolve()
    for source in sources:
        if isinstance(source.path, Path) and out in source.path.resolve().parents:
            raise AlmaError(f"--out {options.out}: holds the input {source.label}; choose a folder outside the input")
    text = [source.label for source in sources if source.form in FORMS_OF_TEXT]
    if options.by is not None and text:
        raise AlmaError(f"--by {options.by}: {text[0]} is plain text, which has no fields; give JSON lines or Parquet")
    if options.field is not None and all(source.form in FORMS_OF_TEXT for source in sources):
        raise AlmaError(
            f"--field {options.field}: {sources[0].label} is plain text, which has no fields; leave --field out, or "
            "give --format"
        )


def completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Tell whether the stream has come about by this command too.

    Raises:
        AlmaError: it was made by a command that differs, and this one does not append.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    advice = "choose another --out, remove the stream, or use --append for what arrived later"
    refuse_other_command(options.out, there.history, record, advice)
    return True


if __name__ == "__main__":
    sys.exit(main(None))
