"""Write the files of a stream from encoded documents."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Mapping

import numpy as np

from data_prep.text.steps import Encoded, Work
from fairseq_alma.data.stream import (
    DICTIONARY,
    TOKEN_SUFFIXES,
    Split,
    Stream,
    StreamFile,
    TokenizerEntry,
    split_name,
    split_names,
)
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, TOKENIZER_FOLDER, TokenFileWriter, id_dtype

MAX_LISTED = 1000
"""Maximum number of dropped documents that the manifest lists."""
_MOST_PENDING = 1 << 26  # maximum number of buffered bytes; the writers buffer, because they keep no file open


def write_stream(work: Work, root: Path, blocks: Iterable[Encoded], record: Mapping[str, Any]) -> Stream:
    """Write all files except the manifest into a folder, for a new stream or for an addition to a stream.

    Args:
        work: completed steps of the command, with their work folder.
        root: folder for the files.
        blocks: encoded documents.
        record: record of the command, see `record_of`.

    Returns:
        The new or extended stream.

    Raises:
        AlmaError: every document of a mega-batch shares an n-gram with held-out text.
    """
    plan, assignment, tokenizer = work.plan, work.assignment, work.tokenizer
    there = plan.there
    writers = [TokenFileWriter(root / name, id_dtype(tokenizer.vocab_size)) for name in assignment.names]
    counts = np.zeros((len(writers), 4), np.int64)  # documents, bytes, words, tokens
    # Counts of each token in mega-batch 0, for dict.txt.
    id_counts = np.zeros(tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS, np.int64)
    listed: list[dict[str, Any]] = []
    num_dropped = bytes_dropped = pending = 0
    for block in blocks:
        numbers, firsts = np.unique(block.sets, return_index=True)
        for number, first, end in zip(numbers.tolist(), firsts, np.append(firsts, len(block.sets))[1:], strict=True):
            own, ids = block.counts[first:end], b"".join(block.ids[first:end])
            counts[number] += [len(own), *own.sum(axis=0)]
            writers[number].write(ids, own[:, 2])
            pending += len(ids)
            if number == 0 and there is None:
                id_counts += np.bincount(np.frombuffer(ids, writers[0].dtype), minlength=len(id_counts))
        listed += block.dropped[: MAX_LISTED - len(listed)]
        num_dropped += len(block.dropped)
        bytes_dropped += sum(each["bytes"] for each in block.dropped)
        if pending > _MOST_PENDING:
            pending = 0
            for writer in writers:
                writer.flush()
    work.refuse_empty_sets(counts[:, 0].tolist(), num_dropped)
    splits = []
    for name, writer, (documents, num_bytes, words, tokens) in zip(
        assignment.names, writers, counts.tolist(), strict=True
    ):
        own_files = zip(TOKEN_SUFFIXES, writer.close(), strict=True)
        files = tuple(StreamFile(f"{name}{suffix}", *each) for suffix, each in own_files)
        splits.append(Split(name, files, documents, words, tokens, num_bytes))
    history: dict[str, Any] = {**record, "num_duplicates": assignment.num_duplicates, "splits": assignment.names}
    if assignment.groups:
        history["groups"] = assignment.groups
    if plan.options.ngram is not None:
        history |= {"num_contaminated": num_dropped, "contaminated_bytes": bytes_dropped, "contaminated": listed}
    hashes = Path(work.folder, "document-hashes").read_bytes()
    known = _write(root, f"document-hashes/{0 if there is None else len(there.history):03d}.u64", hashes)
    by_name = {split.name: split for split in [*(there.splits if there else ()), *splits]}
    num_megabatches = assignment.num_megabatches + (there.num_megabatches if there else 0)
    ordered = tuple(by_name[name] for name in split_names("text", num_megabatches, split_name(0, "holdout") in by_name))
    if there is not None:
        return replace(
            there, splits=ordered, other_files=(*there.other_files, known), history=(*there.history, history)
        )
    paths = (tokenizer.file, *tokenizer.companions)
    tokenizer_files = [_write(root, f"{TOKENIZER_FOLDER}/{path.name}", path.read_bytes()) for path in paths]
    lines = zip(tokenizer.symbols, id_counts[NUM_FAIRSEQ_SYMBOLS:].tolist(), strict=True)
    return Stream(
        root=plan.options.out,
        kind="text",
        seed=plan.options.seed,
        splits=ordered,
        tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, tokenizer_files),
        dictionary=_write(root, DICTIONARY, "".join(f"{symbol} {count}\n" for symbol, count in lines).encode()),
        other_files=(known,),
        history=(history,),
    )


def _write(root: Path, name: str, content: bytes) -> StreamFile:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return StreamFile.describe(root, name)
