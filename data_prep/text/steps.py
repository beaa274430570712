"""The steps from text to a stream in their order, and the manifest that follows from what they leave."""

import hashlib
from dataclasses import replace
from typing import Any, Mapping, Sequence

from data_prep.text.buckets import GatherDropped, KeyDocuments, ReduceBuckets, num_duplicates_of
from data_prep.text.deal import DealDocuments
from data_prep.text.encoding import DealAgain, EncodePieces, left_out_of, listed_of, near_copies_of
from data_prep.text.folder import Folder
from data_prep.text.near_copies import PARAMETERS, FindNearCopies, SignDocuments
from data_prep.text.options import PrepOptions
from data_prep.text.passes import Step, Work
from data_prep.text.pieces import Source
from data_prep.text.survey import CountPieces, SurveyInput, survey_of
from data_prep.text.training import GatherPieces, TrainTokenizer, tokenizer_of
from data_prep.text.writing import LayOutFiles, PlacePieces, WriteFiles, hashes_of, splits_of
from fairseq_alma.data.manifest import Split, StreamFile, TokenizerEntry, file_sha256
from fairseq_alma.data.stream import DICTIONARY, Stream, in_order
from fairseq_alma.data.tokenizer import TOKENIZER_FOLDER, find_tokenizer_file

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
    SignDocuments(),
    FindNearCopies(),
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
            **({"share": source.share} if source.share < 1 else {}),
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
    file = _write(work.out, f"{TOKENIZER_FOLDER}/{tokenizer.file.name}", tokenizer.file.read_bytes())
    lines = (f"{symbol} {count}\n" for symbol, count in zip(tokenizer.symbols, id_counts.tolist(), strict=True))
    return Stream(
        root=work.options.out,
        kind="text",
        seed=work.options.seed,
        splits=tuple(in_order(splits)),
        tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, [file]),
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
        counts["contaminated_words"] = int(left_out["words"].sum(dtype=int))
        counts["contaminated"] = listed_of(work)
    if work.options.near_duplicates is not None:
        near = near_copies_of(work)
        counts["near_duplicates"] = {**PARAMETERS, "documents": len(near), "words": int(near["words"].sum(dtype=int))}
    return counts
