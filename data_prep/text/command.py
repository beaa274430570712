"""``alma-prep-text``: raw text to a stream of mega-batches. Read, deal, train a tokenizer, encode, publish."""

import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from data_prep.build_folder import BuildFolder, refuse_other_command, stream_at
from data_prep.text.buckets import (
    CountPieces,
    GatherDropped,
    KeyDocuments,
    ReduceBuckets,
    SurveyInput,
    num_duplicates_of,
    survey_of,
)
from data_prep.text.deal import DealDocuments
from data_prep.text.encoding import (
    DealAgain,
    EncodePieces,
    LayOutFiles,
    PlacePieces,
    WriteFiles,
    hashes_of,
    left_out_of,
    listed_of,
    splits_of,
)
from data_prep.text.options import AUTO, FORMS_OF_TEXT, PrepOptions, parse_options
from data_prep.text.passes import Folder, PassProgress, Step, Work, carry_out, unpack
from data_prep.text.pieces import SMALLEST_PIECE, Piece, Source, cut_into_pieces, num_workers_for
from data_prep.text.pool import Workers
from data_prep.text.source import find_sources
from data_prep.text.training import GatherPieces, TrainTokenizer, tokenizer_of
from fairseq_alma.cli.entry import command
from fairseq_alma.data.ngrams import HELD_OUT
from fairseq_alma.data.stream import (
    DECONTAMINATE,
    DICTIONARY,
    Split,
    Stream,
    StreamFile,
    TokenizerEntry,
    file_sha256,
    in_order,
)
from fairseq_alma.data.tokens import TOKENIZER_FOLDER, StreamTokenizer, find_tokenizer_file
from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import tell

SHOWN_GROUPS = 12
MUCH_LEFT_OUT = 0.1  # of the bytes
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
    if last.get("num_contaminated"):
        num_bytes, size = last["contaminated_bytes"], last["options"][DECONTAMINATE]
        kept = sum(
            split.num_bytes for split in stream.splits if split.name in last["splits"] and split.name not in HELD_OUT
        )
        share = num_bytes / (num_bytes + kept)
        print(
            f"{last['num_contaminated']:,} documents ({num_bytes:,} bytes, {share:.1%} of what was to be trained on) "
            f"left out: they share {size} words in a row with the validation or the test set (stream.json names them)"
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
                source.path.unlink()
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
        if out in source.path.resolve().parents:
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


STEPS: tuple[Step, ...] = (
    CountPieces(),
    SurveyInput(),
    KeyDocuments(),
    ReduceBuckets(),
    GatherDropped(),
    DealDocuments(),
    GatherPieces(),
    TrainTokenizer(),
    EncodePieces(),
    DealAgain(),
    PlacePieces(),
    LayOutFiles(),
    WriteFiles(),
)


def record_of(options: PrepOptions, sources: Sequence[Source], digests: Sequence[str]) -> dict[str, Any]:
    """Describe a command by all that decides its result.

    Args:
        options: of the command.
        sources: the input.
        digests: sha256 of each of its files.
    """
    tokenizer = None if options.tokenizer is None else file_sha256(find_tokenizer_file(options.tokenizer))
    inputs = [
        {
            "argument": source.argument,
            "name": source.name,
            "format": source.form,
            "size": source.size,
            "sha256": digest,
        }
        for source, digest in zip(sources, digests, strict=True)
    ]
    command = "append" if options.append else "create"
    return {"command": command, "options": options.that_decide(tokenizer), "inputs": inputs}


def finish(work: Work, record: Mapping[str, Any]) -> Stream:
    """Write what belongs to a stream beside its sets, when all steps are done.

    Args:
        work: what was done.
        record: of the command, for the stream's history.

    Returns:
        The stream, whose manifest is not written yet.
    """
    splits, id_counts = splits_of(work)
    there = work.there
    number = 0 if there is None else len(there.history)
    hashes = _write(work.out, f"document-hashes/{number:03d}.u64", hashes_of(work).tobytes())
    history = {**record, **_counts_of(work, splits)}
    if there is not None:
        return replace(
            there,
            splits=tuple(in_order([*there.splits, *splits])),
            other_files=(*there.other_files, hashes),
            history=(*there.history, history),
        )
    tokenizer = work.once(tokenizer_of)
    kept = (tokenizer.file, *tokenizer.companions)
    files = [_write(work.out, f"{TOKENIZER_FOLDER}/{path.name}", path.read_bytes()) for path in kept]
    lines = (f"{symbol} {count}\n" for symbol, count in zip(tokenizer.symbols, id_counts.tolist(), strict=True))
    return Stream(
        root=work.options.out,
        kind="text",
        seed=work.options.seed,
        splits=tuple(in_order(splits)),
        tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, files),
        dictionary=_write(work.out, DICTIONARY, "".join(lines).encode()),
        other_files=(hashes,),
        history=(history,),
    )


def _write(folder: Folder, name: str, content: bytes) -> StreamFile:
    folder.write(name, content)
    return StreamFile(name, len(content), hashlib.sha256(content).hexdigest())


def _counts_of(work: Work, splits: Sequence[Split]) -> dict[str, Any]:
    counts: dict[str, Any] = {"num_duplicates": num_duplicates_of(work), "splits": [split.name for split in splits]}
    if groups := work.once(survey_of).groups:
        counts["groups"] = list(groups)
    if work.options.ngram is not None:
        left_out = work.once(left_out_of)
        counts["num_contaminated"] = len(left_out)
        counts["contaminated_bytes"] = int(left_out["words"].sum(dtype=int))
        counts["contaminated"] = listed_of(work)
    return counts


if __name__ == "__main__":
    sys.exit(main(None))
