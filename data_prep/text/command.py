"""``alma-prep-text``: raw text to a stream of mega-batches. Read, deal, train a tokenizer, encode, publish."""

import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from data_prep.build_folder import BuildFolder, refuse_other_command, stream_at
from data_prep.text.deal import DROPPED, Deal, Shares, Words, deal_again, deal_documents
from data_prep.text.options import AUTO, FORMS_OF_TEXT, HOLDOUT_WORDS, PrepOptions, parse_options, vocab_size_for
from data_prep.text.passes import Passes, PassProgress, unpack
from data_prep.text.pieces import SMALLEST_PIECE, Source, cut_into_pieces, num_workers_for
from data_prep.text.pool import Workers
from data_prep.text.source import find_sources
from data_prep.text.survey import Survey, survey_documents
from data_prep.text.training import CHOSEN, HELD_OUT, GatherPiece, Training, choose_sample
from data_prep.text.writing import CACHED_CHUNKS, ENCODED, LOOKED_AT, EncodePiece, LeftOut, encode, write_sets
from fairseq_alma.cli.entry import command
from fairseq_alma.data.manifest import Split, StreamFile, TokenizerEntry, file_sha256
from fairseq_alma.data.ngrams import held_out_ngrams
from fairseq_alma.data.stream import DECONTAMINATE, DICTIONARY, Stream, holdout_name, in_order, megabatch_name
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS, TokenFile, id_dtype
from fairseq_alma.data.tokenizer import FILE_NAMES, TOKENIZER_FOLDER, StreamTokenizer, find_tokenizer_file
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.files import open_atomically
from fairseq_alma.terminal import tell

SHOWN_GROUPS = 12
FEW_PACKED = 64
"""Compressed files; where there are more, they keep as many cores busy as they are, and each pass unpacks them."""
HELD_OUT_NGRAMS = "held-out-ngrams.npy"


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
    with BuildFolder(options.out, "alma-prep-text", keeps=True) as build:
        there = _stream_at(options)  # as it is under the lock
        sources = find_sources(options.inputs, options.form, options.text_field, build.path, options.out, options.group)
        _refuse_own_output(options, sources)
        _refuse_idle_field(options, sources)
        before = [_stamp(source) for source in sources]
        with Workers(min(options.workers, num_workers_for(sources))) as workers:
            record = _record_of(options, sources, workers)
            if there is not None and _completed_before(options, there, record):
                return None
            kept = build.keep({**record, "stream": None if there is None else there.fingerprint})
            work = _Work(options, sources, _passes_over(sources, kept, workers), record, build)
            stream = work.create() if there is None else work.append(there)
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


def _passes_over(sources: Sequence[Source], kept: Path, workers: Workers) -> Passes:
    """Cut the input into pieces; few compressed files are unpacked first, as each would be one."""
    packed = [number for number, source in enumerate(sources) if source.is_packed and source.size > SMALLEST_PIECE]
    if 0 < len(packed) < FEW_PACKED:
        tasks = [(sources[number], kept / f"unpacked-{number}") for number in packed]
        with PassProgress("unpacking", sum(source.size for source, _ in tasks)) as progress:
            for _ in workers.map(unpack, tasks, progress.update):
                pass
        read = dict(zip(packed, (path for _, path in tasks), strict=True))
        sources = [replace(source, path=read.get(at, source.path)) for at, source in enumerate(sources)]
    return Passes(cut_into_pieces(sources), kept, workers)


def _stream_at(options: PrepOptions) -> Optional[Stream]:
    """Return the stream that is there; None where one is to be made."""
    there = stream_at(options.out, "text")
    if there is None and options.append:
        raise AlmaError(f"--out {options.out}: no stream there to append to; leave --append out to make one")
    return there


@dataclass(frozen=True)
class _Work:
    """A command at work.

    Attributes:
        options: of the command.
        sources: the input.
        passes: over it.
        record: what the stream's history will say of the command.
        build: where the stream is built.
    """

    options: PrepOptions
    sources: Sequence[Source]
    passes: Passes
    record: dict[str, Any]
    build: BuildFolder

    def create(self) -> Stream:
        """Build a new stream."""
        options, root = self.options, self.build.path
        survey = survey_documents(self.passes, self.sources)
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
        tokenizer, held_out = self._train(survey, deal, root / TOKENIZER_FOLDER)
        deal, left_out = self._encode(survey, shares, deal, tokenizer, held_out)
        numbers = range(num_megabatches)
        names = [*map(megabatch_name, numbers), "valid", "test", *_holdouts(options.holdout_words, numbers)]
        splits = write_sets(self.passes, survey, deal, names, root, id_dtype(tokenizer.vocab_size))
        counting = _CountIds(tokenizer.vocab_size)
        counts = self.passes.workers.run(counting, root / megabatch_name(0))
        _write_dictionary(tokenizer, counts, root / DICTIONARY)
        file = StreamFile.describe(root, f"{TOKENIZER_FOLDER}/{tokenizer.file.name}")
        return Stream(
            root=options.out,
            kind="text",
            seed=options.seed,
            splits=tuple(in_order(splits)),
            tokenizer=TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, [file]),
            dictionary=StreamFile.describe(root, DICTIONARY),
            other_files=(_write_hashes(survey, deal, root, 0),),
            history=(_with_counts(self.record, survey, deal, splits, left_out),),
        )

    def append(self, there: Stream) -> Stream:
        """Build the new mega-batches of a stream in the build folder."""
        options, root = self.options, self.build.path
        there.verify([])
        drop = None if options.keep_duplicates else _hashes_of(there)
        holdout_words = there.history[0]["options"].get(HOLDOUT_WORDS) if there.history else None
        survey = survey_documents(self.passes, self.sources)
        _refuse_known_groups(options, survey, there)
        num_new = _num_made(options, survey)
        shares = Shares(num_new, by_argument=options.is_given_apart, held_out=False, holdout_words=holdout_words)
        held_out = None
        if options.ngram is not None:
            held_out = self.passes.folder / HELD_OUT_NGRAMS
            self.passes.workers.run(_KnownNgrams(there, options.ngram), held_out)
        deal = deal_documents(survey, shares, options.seed, drop)
        tokenizer = StreamTokenizer.open(there.root)
        deal, left_out = self._encode(survey, shares, deal, tokenizer, held_out)
        numbers = range(there.num_megabatches, there.num_megabatches + num_new)
        names = [*map(megabatch_name, numbers), *_holdouts(holdout_words, numbers)]
        self.build.refuse_links(map(Path, names))
        splits = write_sets(self.passes, survey, deal, names, root, id_dtype(tokenizer.vocab_size))
        hashes = _write_hashes(survey, deal, root, len(there.history))
        return replace(
            there,
            splits=tuple(in_order([*there.splits, *splits])),
            other_files=(*there.other_files, hashes),
            history=(*there.history, _with_counts(self.record, survey, deal, splits, left_out)),
        )

    def _train(self, survey: Survey, deal: Deal, folder: Path) -> tuple[StreamTokenizer, Optional[Path]]:
        """Put the tokenizer that was asked for into the stream's folder; return it, and the held-out n-grams."""
        folder.mkdir()
        options, passes = self.options, self.passes
        kind, max_words, vocab_size = options.training
        if vocab_size == AUTO:
            vocab_size = vocab_size_for(int(survey.words[deal.sets == 0].sum(dtype=np.int64)))
        given = None if options.tokenizer is None else StreamTokenizer(options.tokenizer)
        marks = np.zeros(len(survey), np.uint8)
        if given is None:
            marks[choose_sample(survey, deal, max_words)] = CHOSEN
        held_out = None
        if options.ngram is not None:
            held_out = passes.folder / HELD_OUT_NGRAMS
            valid = _num_made(options, survey)
            marks[(deal.sets == valid) | (deal.sets == valid + 1)] = HELD_OUT
        trained = passes.folder / FILE_NAMES[kind]
        if marks.any():
            title = "reading the tokenizer's sample" if given is None else "reading the held-out text"
            for _ in passes.run(title, GatherPiece(options.decontaminate_ngram), survey.by_piece(marks)):
                pass
            wanted = trained if given is None else None
            job = Training(passes.folders, wanted, held_out, kind, vocab_size, passes.workers.number)
            passes.workers.run_apart(Training.run, job)
        file, kind = (trained, kind) if given is None else (given.file, given.kind)
        shutil.copyfile(file, folder / FILE_NAMES[kind])
        return StreamTokenizer(folder), held_out

    def _encode(
        self, survey: Survey, shares: Shares, deal: Deal, tokenizer: StreamTokenizer, held_out: Optional[Path]
    ) -> tuple[Deal, LeftOut]:
        """Encode all documents; deal again without what shares any of the n-grams that are held out."""
        marks = (deal.sets != DROPPED).astype(np.uint8) * ENCODED
        looked_at = deal.sets != DROPPED
        if shares.held_out:
            looked_at &= (deal.sets != shares.num_megabatches) & (deal.sets != shares.num_megabatches + 1)
        marks[looked_at] |= LOOKED_AT
        cached = CACHED_CHUNKS // self.passes.workers.number
        dtype = id_dtype(tokenizer.vocab_size)
        function = EncodePiece(tokenizer.file, dtype, cached, self.options.decontaminate_ngram, held_out)
        left_out = encode(self.passes, survey, marks, function)
        return (deal if held_out is None else deal_again(survey, shares, deal, left_out.documents)), left_out


@dataclass(frozen=True)
class _KnownNgrams:
    """Note the n-grams of what a stream holds out."""

    stream: Stream
    size: int

    def __call__(self, path: Path) -> None:
        if not path.exists():
            with open_atomically(path) as file:
                np.save(file, held_out_ngrams(self.stream, self.size))


@dataclass(frozen=True)
class _CountIds:
    """Count the ids of a token file."""

    vocab_size: int

    def __call__(self, prefix: Path) -> np.ndarray:
        return TokenFile(prefix).count_ids(self.vocab_size + NUM_FAIRSEQ_SYMBOLS)[NUM_FAIRSEQ_SYMBOLS:]


def _num_made(options: PrepOptions, survey: Survey) -> int:
    """Return the number of mega-batches that a command makes, of ``--by`` once the groups are known."""
    return options.num_megabatches or len(survey.groups)


def _holdouts(words: Optional[Words], numbers: range) -> list[str]:
    """Return the names of the held-out slices of some mega-batches, if words are held out."""
    return [] if words is None else [holdout_name(number) for number in numbers]


def _write_dictionary(tokenizer: StreamTokenizer, counts: np.ndarray, path: Path) -> None:
    """Write ``dict.txt``: per token its symbol and how often it occurs in the first mega-batch."""
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
    record: dict[str, Any], survey: Survey, deal: Deal, splits: Sequence[Split], left_out: LeftOut
) -> dict[str, Any]:
    counts: dict[str, Any] = {"num_duplicates": deal.num_duplicates, "splits": [split.name for split in splits]}
    if survey.groups:
        counts["groups"] = list(survey.groups)
    if record["options"][DECONTAMINATE] is not None:
        counts["num_contaminated"] = int(left_out.documents.sum())
        counts["contaminated_words"] = int(survey.words[left_out.documents].sum(dtype=np.int64))
        counts["contaminated"] = [
            {"words": int(survey.words[number]), "begins": begins, "ngram": ngram}
            for number, begins, ngram in left_out.first
        ]
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


def _record_of(options: PrepOptions, sources: Sequence[Source], workers: Workers) -> dict[str, Any]:
    """Describe a command by all that decides its result."""
    digests = workers.map(file_sha256, [source.path for source in sources])
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


if __name__ == "__main__":
    sys.exit(main(None))
