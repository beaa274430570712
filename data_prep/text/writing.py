"""Write the sets of a stream from encoded documents, and what belongs to a stream next to them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Mapping

import numpy as np

from data_prep.text.steps import MAX_LISTED, Encoded, Plan, assignment_of, refuse_empty_sets, tokenizer_of
from fairseq_alma.data.stream import (
    DICTIONARY,
    TOKEN_SUFFIXES,
    Split,
    Stream,
    StreamFile,
    TokenizerEntry,
    holdout_name,
    in_order,
    megabatch_name,
)
from fairseq_alma.data.tokens import (
    NUM_FAIRSEQ_SYMBOLS,
    TOKENIZER_FOLDER,
    StreamTokenizer,
    TokenFileWriter,
    id_dtype,
)

_MOST_WAITING = 1 << 26  # bytes of tokens in memory; thousands of files cannot all be open


def write_stream(plan: Plan, folder: str, root: Path, blocks: Iterable[Encoded], record: Mapping[str, Any]) -> Stream:
    """Write all files of a stream, or of what is appended to one, into ``root``, but for the manifest.

    Raises:
        AlmaError: a mega-batch is empty, because its documents share words with what is held out.
    """
    there, assignment, tokenizer = plan.there, assignment_of(folder), tokenizer_of(folder)
    splits, left_out, id_counts = _write_sets(plan, assignment, tokenizer, root, blocks)
    names = [split.name for split in splits]
    history: dict[str, Any] = {**record, "num_duplicates": assignment["num_duplicates"], "splits": names}
    if assignment["groups"]:
        history["groups"] = assignment["groups"]
    if plan.options.ngram is not None:
        history |= left_out
    hashes = Path(folder, "document-hashes.u64").read_bytes()
    known = _write(root, f"document-hashes/{0 if there is None else len(there.history):03d}.u64", hashes)
    if there is not None:
        return replace(
            there,
            splits=tuple(in_order([*there.splits, *splits])),
            other_files=(*there.other_files, known),
            history=(*there.history, history),
        )
    kept = (tokenizer.file, *tokenizer.companions)
    files = [_write(root, f"{TOKENIZER_FOLDER}/{path.name}", path.read_bytes()) for path in kept]
    lines = zip(tokenizer.symbols, id_counts[NUM_FAIRSEQ_SYMBOLS:].tolist(), strict=True)
    return Stream(
        root=plan.options.out,
        kind="text",
        seed=plan.options.seed,
        splits=tuple(in_order(splits)),
        tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, files),
        dictionary=_write(root, DICTIONARY, "".join(f"{symbol} {count}\n" for symbol, count in lines).encode()),
        other_files=(known,),
        history=(history,),
    )


def _write_sets(
    plan: Plan, assignment: Mapping[str, Any], tokenizer: StreamTokenizer, root: Path, blocks: Iterable[Encoded]
) -> tuple[list[Split], dict[str, Any], np.ndarray]:
    """Write the token files; return the splits, what was left out, and how often each id occurs in mega-batch 0."""
    first = 0 if plan.there is None else plan.there.num_megabatches
    arriving = range(first, first + assignment["cuts"].num_megabatches)
    names = [*map(megabatch_name, arriving), *(["valid", "test"] if assignment["cuts"].held_out else [])]
    names += map(holdout_name, arriving) if assignment["cuts"].holdouts else []
    writers = [TokenFileWriter(root / name, id_dtype(tokenizer.vocab_size)) for name in names]
    counts = np.zeros((len(names), 4), np.int64)  # documents, bytes, words, tokens
    id_counts = np.zeros(tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS, np.int64)
    listed: list[dict[str, Any]] = []
    num_left_out = bytes_left_out = waiting = 0
    for block in blocks:
        numbers, firsts = np.unique(block.sets, return_index=True)
        for number, first, end in zip(numbers.tolist(), firsts, np.append(firsts, len(block.sets))[1:], strict=True):
            own, ids = block.counts[first:end], b"".join(block.ids[first:end])
            counts[number] += [len(own), *own.sum(axis=0)]
            writers[number].write(ids, own[:, 2])
            waiting += len(ids)
            if number == 0 and plan.there is None:  # dict.txt counts the ids of mega-batch 0
                id_counts += np.bincount(np.frombuffer(ids, writers[0].dtype), minlength=len(id_counts))
        listed += block.left_out[: MAX_LISTED - len(listed)]
        num_left_out += len(block.left_out)
        bytes_left_out += sum(each["bytes"] for each in block.left_out)
        if waiting > _MOST_WAITING:
            waiting = 0
            for writer in writers:
                writer.flush()
    total = int(counts[:, 0].sum()) + num_left_out
    why = f"{num_left_out:,} of {total:,} documents share words in a row with what is held out and"
    refuse_empty_sets(assignment, counts[:, 0].tolist(), total, why if num_left_out else "")
    splits = []
    for name, writer, (documents, num_bytes, words, tokens) in zip(names, writers, counts.tolist(), strict=True):
        own_files = zip(TOKEN_SUFFIXES, writer.close(), strict=True)
        entries = tuple(StreamFile(f"{name}{suffix}", *each) for suffix, each in own_files)
        splits.append(Split(name, entries, documents, words, tokens, num_bytes))
    left_out = {"num_contaminated": num_left_out, "contaminated_bytes": bytes_left_out, "contaminated": listed}
    return splits, left_out, id_counts


def _write(root: Path, name: str, content: bytes) -> StreamFile:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return StreamFile.describe(root, name)
