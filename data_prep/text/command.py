"""``alma-prep-text``: raw text to a stream of mega-batches. Read, deal, train a tokenizer, encode, publish."""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from data_prep.build_folder import BuildFolder, refuse_other_command, stream_at
from data_prep.text.deal import DROPPED, Deal, Shares, Words, deal_again, deal_documents
from data_prep.text.options import AUTO, FORMS_OF_TEXT, HOLDOUT_WORDS, PrepOptions, parse_options, vocab_size_for
from data_prep.text.pool import run_apart
from data_prep.text.source import Source, find_sources
from data_prep.text.survey import Survey, survey_documents
from data_prep.text.writing import LeftOut, SecondPass, choose_sample, find_shared, write_sets
from fairseq_alma.cli.entry import command
from fairseq_alma.data.manifest import Split, StreamFile, TokenizerEntry, file_sha256
from fairseq_alma.data.ngrams import held_out_ngrams
from fairseq_alma.data.stream import DECONTAMINATE, DICTIONARY, Stream, holdout_name, in_order, megabatch_name
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS, TokenFile
from fairseq_alma.data.tokenizer import FILE_NAMES, TOKENIZER_FOLDER, StreamTokenizer, find_tokenizer_file
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.terminal import tell

MAX_LISTED = 1000
"""Documents that are left out and named in the manifest."""
SHOWN_GROUPS = 12


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
        print(
            f"{last['num_contaminated']:,} documents ({last['contaminated_words']:,} words) left out: they share "
            f"{last['options'][DECONTAMINATE]} words in a row with the validation or the test set (stream.json names "
            "them)"
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
    _stream_at(options)  # what cannot be shows before the input is read
    if options.tokenizer is not None:
        StreamTokenizer(options.tokenizer)  # a broken one shows now, not after the first pass
    with BuildFolder(options.out, "alma-prep-text") as build:
        there = _stream_at(options)  # as it is under the lock
        sources = find_sources(options.inputs, options.form, options.text_field, build.path, options.out, options.group)
        _refuse_own_output(options, sources)
        _refuse_idle_field(options, sources)
        before = [_stamp(source) for source in sources]
        record = _record_of(options, sources)
        if there is not None and _completed_before(options, there, record):
            return None
        survey = survey_documents(sources, options.workers)
        if there is None:
            stream = _create(options, sources, survey, record, build.path)
        else:
            stream = _append(options, sources, survey, record, build, there)
        for source, stamp in zip(sources, before, strict=True):
            if _stamp(source) != stamp:
                raise AlmaError(f"{source.label}: changed while it was being read; give the command again")
        for source in sources:
            if source.is_copy:
                source.path.unlink()
        if there is None:
            build.publish_stream(stream)
        else:
            build.publish_additions(stream)
    return stream


def _stream_at(options: PrepOptions) -> Optional[Stream]:
    """Return the stream that is there; None where one is to be made."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(f"--out {options.out}: no stream there to append to; leave --append out to make one")
    return there


def _create(
    options: PrepOptions, sources: Sequence[Source], survey: Survey, record: dict[str, Any], root: Path
) -> Stream:
    """Build a new stream under ``root``."""
    num_megabatches = _num_made(options, survey)
    shares = Shares(
        num_megabatches,
        by_argument=options.is_given_apart,
        valid_words=options.valid_words,
        test_words=options.test_words,
        holdout_words=options.holdout_words,
    )
    drop = None if options.keep_duplicates else np.empty(0, np.uint64)
    deal = deal_documents(survey, shares, options.seed, drop)
    tokenizer, held_out = _second_pass(options, sources, survey, deal, root / TOKENIZER_FOLDER)
    deal, left_out = _decontaminate(options, sources, survey, shares, deal, held_out, root)
    numbers = range(num_megabatches)
    names = [*map(megabatch_name, numbers), "valid", "test", *_holdouts(options.holdout_words, numbers)]
    splits = write_sets(sources, survey, deal, names, tokenizer, root, options.workers)
    _write_dictionary(tokenizer, root / megabatch_name(0), root / DICTIONARY)
    file = StreamFile.describe(root, f"{TOKENIZER_FOLDER}/{tokenizer.file.name}")
    return Stream(
        root=options.out,
        kind="text",
        seed=options.seed,
        splits=tuple(in_order(splits)),
        tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, [file]),
        dictionary=StreamFile.describe(root, DICTIONARY),
        other_files=(_write_hashes(survey, deal, root, 0),),
        history=(_with_counts(record, survey, deal, splits, left_out),),
    )


def _append(
    options: PrepOptions,
    sources: Sequence[Source],
    survey: Survey,
    record: dict[str, Any],
    build: BuildFolder,
    there: Stream,
) -> Stream:
    """Build the new mega-batches of a stream in the build folder."""
    root = build.path
    there.verify([])
    drop = None if options.keep_duplicates else _hashes_of(there)
    holdout_words = there.history[0]["options"].get(HOLDOUT_WORDS) if there.history else None
    _refuse_known_groups(options, survey, there)
    num_new = _num_made(options, survey)
    shares = Shares(num_new, by_argument=options.is_given_apart, held_out=False, holdout_words=holdout_words)
    held_out = None if options.ngram is None else held_out_ngrams(there, options.ngram)
    deal = deal_documents(survey, shares, options.seed, drop)
    deal, left_out = _decontaminate(options, sources, survey, shares, deal, held_out, root)
    numbers = range(there.num_megabatches, there.num_megabatches + num_new)
    names = [*map(megabatch_name, numbers), *_holdouts(holdout_words, numbers)]
    build.refuse_links(map(Path, names))
    tokenizer = StreamTokenizer.open(there.root)
    splits = write_sets(sources, survey, deal, names, tokenizer, root, options.workers)
    hashes = _write_hashes(survey, deal, root, len(there.history))
    return replace(
        there,
        splits=tuple(in_order([*there.splits, *splits])),
        other_files=(*there.other_files, hashes),
        history=(*there.history, _with_counts(record, survey, deal, splits, left_out)),
    )


def _num_made(options: PrepOptions, survey: Survey) -> int:
    """Return the number of mega-batches that a command makes, of ``--by`` once the groups are known."""
    return options.num_megabatches or len(survey.groups)


def _holdouts(words: Optional[Words], numbers: range) -> list[str]:
    """Return the names of the held-out slices of some mega-batches, if words are held out."""
    return [] if words is None else [holdout_name(number) for number in numbers]


def _second_pass(
    options: PrepOptions, sources: Sequence[Source], survey: Survey, deal: Deal, folder: Path
) -> tuple[StreamTokenizer, Optional[np.ndarray]]:
    """Put the tokenizer that was asked for into the stream's folder; return it, and the n-grams that are held out."""
    folder.mkdir()
    kind, max_words, vocab_size = options.training
    if vocab_size == AUTO:
        vocab_size = vocab_size_for(int(survey.words[deal.sets == 0].sum(dtype=np.int64)))
    chosen, held_out = np.zeros((2, len(survey)), bool)
    if options.tokenizer is not None:
        given = StreamTokenizer(options.tokenizer)
        shutil.copyfile(given.file, folder / FILE_NAMES[given.kind])
    else:
        chosen = choose_sample(survey, deal, max_words)
    if options.ngram is not None:
        valid = _num_made(options, survey)
        held_out = (deal.sets == valid) | (deal.sets == valid + 1)
    hashes = None
    if chosen.any() or held_out.any():
        job = SecondPass(
            sources=sources,
            words=survey.words,
            block_sizes=survey.block_sizes,
            chosen=chosen,
            held_out=held_out,
            ngram=options.decontaminate_ngram,
            kind=kind,
            vocab_size=vocab_size,
            num_workers=options.workers,
        )
        # Training takes much memory and would keep it, so it has a process of its own.
        content, hashes = job.run() if options.workers == 1 else run_apart(SecondPass.run, job)
        if content is not None:
            file = folder / FILE_NAMES[kind]
            with naming(file):
                file.write_bytes(content)
    return StreamTokenizer(folder), hashes if held_out.any() else None


def _decontaminate(
    options: PrepOptions,
    sources: Sequence[Source],
    survey: Survey,
    shares: Shares,
    deal: Deal,
    held_out: Optional[np.ndarray],
    root: Path,
) -> tuple[Deal, list[LeftOut]]:
    """Deal again without what shares any of the n-grams that are held out, so that mega-batches stay equal."""
    if held_out is None:
        return deal, []
    file = root / "held-out-ngrams.npy"
    with naming(file):
        np.save(file, held_out)
    looked_at = deal.sets != DROPPED
    if shares.held_out:
        looked_at &= (deal.sets != shares.num_megabatches) & (deal.sets != shares.num_megabatches + 1)
    shared = find_shared(sources, survey, looked_at, options.decontaminate_ngram, file, options.workers)
    file.unlink()
    left_out = np.zeros(len(survey), bool)
    left_out[[each.number for each in shared]] = True
    return deal_again(survey, shares, deal, left_out), shared


def _write_dictionary(tokenizer: StreamTokenizer, first_megabatch: Path, path: Path) -> None:
    """Write ``dict.txt``: per token its symbol and how often it occurs in the first mega-batch."""
    counts = TokenFile(first_megabatch).count_ids(tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS)[NUM_FAIRSEQ_SYMBOLS:]
    with naming(path), open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{symbol} {count}\n" for symbol, count in zip(tokenizer.symbols, counts, strict=True))


def _write_hashes(survey: Survey, deal: Deal, root: Path, number: int) -> StreamFile:
    """Keep eight bytes of each document, by which ``--append`` knows what the stream has."""
    name = f"document-hashes/{number:03d}.u64"
    (root / name).parent.mkdir(exist_ok=True)
    with naming(root / name):
        (root / name).write_bytes(np.sort(survey.hashes[deal.order]).astype("<u8").tobytes())
    return StreamFile.describe(root, name)


def _hashes_of(stream: Stream) -> np.ndarray:
    for file in stream.other_files:
        file.verify(stream.root)
    return np.concatenate([np.fromfile(stream.root / file.path, dtype="<u8") for file in stream.other_files])


def _with_counts(
    record: dict[str, Any], survey: Survey, deal: Deal, splits: Sequence[Split], left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    counts: dict[str, Any] = {"num_duplicates": deal.num_duplicates, "splits": [split.name for split in splits]}
    if survey.groups:
        counts["groups"] = list(survey.groups)
    if record["options"][DECONTAMINATE] is not None:
        listed = [
            {"words": each.num_words, "begins": each.begins, "ngram": each.ngram} for each in left_out[:MAX_LISTED]
        ]
        counts["num_contaminated"] = len(left_out)
        counts["contaminated_words"] = sum(each.num_words for each in left_out)
        counts["contaminated"] = listed
    return {**record, **counts}


def _refuse_known_groups(options: PrepOptions, survey: Survey, there: Stream) -> None:
    """Raise AlmaError if a value of ``--by`` is a mega-batch of the stream already."""
    known = [group for entry in there.history for group in entry.get("groups", ())]
    again = sorted({*survey.groups} & {*known})
    if again:
        raise AlmaError(
            f"--by {options.by}: {', '.join(again[:3])} came before and is mega-batch {known.index(again[0])} of "
            f"{options.out}; leave those documents out, or append them with --megabatches"
        )


def _refuse_own_output(options: PrepOptions, sources: Sequence[Source]) -> None:
    out = options.out.resolve()
    for source in sources:
        if out in source.path.resolve().parents:
            raise AlmaError(f"--out {options.out}: holds the input {source.label}; choose a folder outside the input")


def _refuse_idle_field(options: PrepOptions, sources: Sequence[Source]) -> None:
    text = [source.label for source in sources if source.form in FORMS_OF_TEXT]
    if options.by is not None and text:
        raise AlmaError(f"--by {options.by}: {text[0]} is plain text, which has no fields; give JSON lines or Parquet")
    if options.field is not None and all(source.form in FORMS_OF_TEXT for source in sources):
        raise AlmaError(
            f"--field {options.field}: {sources[0].label} is plain text, which has no fields; leave --field out, or "
            "give --format"
        )


def _stamp(source: Source) -> tuple[int, int]:
    status = source.path.stat()
    return status.st_size, status.st_mtime_ns


def _completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Tell whether the stream has come about by this command too.

    Raises:
        AlmaError: it was made by a command that differs, and this one does not append.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    advice = "choose another --out, remove the stream, or use --append for what arrived later"
    refuse_other_command(options.out, there.history, record, advice)
    return True


def _record_of(options: PrepOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """Describe a command by all that decides its result."""
    tokenizer = None if options.tokenizer is None else file_sha256(find_tokenizer_file(options.tokenizer))
    inputs = [
        {
            "argument": source.argument,
            "name": source.name,
            "format": source.form,
            "size": source.size,
            "sha256": file_sha256(source.path),
            **({"share": source.share} if source.share < 1 else {}),
        }
        for source in sources
    ]
    command = "append" if options.append else "create"
    return {"command": command, "options": options.that_decide(tokenizer), "inputs": inputs}


if __name__ == "__main__":
    sys.exit(main(None))
