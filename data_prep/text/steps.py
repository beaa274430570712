"""Make a stream of text in steps, on any number of workers or machines. The steps exchange files in a work folder.

- Hash: compute the hash, sort key and size of each document of a piece (see ``documents``).
- Assign: drop documents with the hash of an earlier document, and assign the remaining documents to sets.
- Sample: read the documents again, and save the n-grams of held-out documents and the training text of the tokenizer.
- Prepare: merge the n-grams of the held-out documents, and train the tokenizer.
- Count: read the documents again, and count the training documents with each of these n-grams.
- Encode: read the documents again, drop training documents that repeat held-out text, and encode the rest.
"""

import pickle
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Optional, Sequence

import numpy as np

from data_prep.text.assignment import (
    COMMON_IN_HELD_OUT,
    COMMON_IN_TRAINING,
    HeldOutNgrams,
    Ngrams,
    Shares,
    TooLittleTextError,
    assign,
    distinct_of_each,
    document_hashes,
    held_out_ngrams,
    keys_of,
    ngram_at,
    ngrams_of,
)
from data_prep.text.documents import FORMS_OF_TEXT, Piece, Source, batches_of, cut_into_pieces, find_sources
from fairseq_alma.data.stream import (
    DICTIONARY,
    Split,
    Stream,
    StreamFile,
    TokenizerEntry,
    file_sha256,
    split_name,
    split_names,
)
from fairseq_alma.data.tokens import (
    AUTO,
    FILE_NAMES,
    TOKENIZER_FOLDER,
    DocumentEncoder,
    StreamTokenizer,
    TokenFileWriter,
    id_dtype,
    train_tokenizer,
    vocab_size_for,
)
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES, open_atomically
from fairseq_alma.terminal import print_line

if TYPE_CHECKING:
    from data_prep.text.command import PrepOptions

DROPPED = -1  # set number of a dropped document
_HASHED = np.dtype([("hash", "<u8"), ("key", "<u8"), ("bytes", "<u4"), ("argument", "<u2")])
_TOKENIZER_TEXT, _HELD_OUT = 1, 2  # marks of the documents that the sample step reads
_DOCUMENTS, _NGRAM_COUNTS = "document-hashes", "ngram-counts"  # folders of a stream
_NGRAMS = ("ngram-hashes.npy", "ngram-owners.npy", "ngram-sizes.npy")


@dataclass(frozen=True)
class Plan:
    """Options and input files of a command, and the division of the files into pieces."""

    options: "PrepOptions"
    sources: tuple[Source, ...]
    pieces: tuple[Piece, ...]
    stamps: tuple[tuple[int, int], ...]  # size and modification time of each input file
    there: Optional[Stream] = None  # stream to append to; None for a new stream
    num_workers: int = 1  # number of processes on one machine

    def refuse_changes(self) -> None:
        """Raise AlmaError if the size or modification time of an input file differs from the plan."""
        for source, stamp in zip(self.sources, self.stamps, strict=True):
            if source.stamp != stamp:
                raise _changed(source.label)


def _changed(label: str) -> AlmaError:
    return AlmaError(f"{label}: the file changed while it was read; run the command again when the file is complete")


@dataclass(frozen=True)
class Assignment:
    """Result of the assign step: sets, groups and number of duplicates."""

    names: list[str]  # name of each set, as in the manifest
    num_megabatches: int  # number of new mega-batches, which are the first sets
    groups: list[str]  # group of each mega-batch; empty without ``--by``
    num_duplicates: int  # number of documents dropped as duplicates of earlier documents
    duplicate_bytes: int  # number of bytes of these documents
    first_bytes: int  # number of bytes of the first mega-batch


@dataclass
class Encoded:
    """Encoded documents of a block, sorted by set, and the documents dropped from the block."""

    bytes_read: int  # number of bytes of the input that were read for the block
    sets: np.ndarray  # ``(documents,)``, int16, ascending: set number of each document
    counts: np.ndarray  # ``(documents, 3)``, int64: bytes, words and tokens of each document
    ids: list[bytes]  # ids of each document, as bytes of the token file
    dropped: list[dict[str, Any]]  # bytes, first words and shared n-gram of each contaminated document


def make_plan(there: Optional[Stream], options: "PrepOptions", copies: Optional[Path], num_workers: int) -> Plan:
    """Find the input files, divide them into pieces, and return the plan.

    Args:
        there: stream to append to; None for a new stream.
        options: options of the command.
        copies: folder for copies of pipes; None if pipes are not allowed.
        num_workers: maximum number of processes.

    Raises:
        AlmaError: an input cannot be read, or ``--field`` or ``--by`` is given, but the input has no fields.
    """
    sources = find_sources(
        options.inputs,
        options.format,
        options.field_or_default,
        copies,
        options.ignored or options.out,
        options.by,
        options.period,
    )
    text = [f"{each.label} is plain text, which has no fields" for each in sources if each.form in FORMS_OF_TEXT]
    if options.by is not None and text:
        raise AlmaError(f"--by {options.by}: {text[0]}; give JSON lines or Parquet")
    if options.field is not None and len(text) == len(sources):
        raise AlmaError(f"--field {options.field}: {text[0]}; remove --field, or give --format jsonl")
    pieces, stamps = tuple(cut_into_pieces(sources)), tuple(source.stamp for source in sources)
    return Plan(options, tuple(sources), pieces, stamps, there, min(num_workers, len(pieces)))


class Work:
    """Steps of the conversion, one method each. A step reads the files of earlier steps from the work folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[type["Work"], tuple[str]]:
        return Work, (self.folder,)  # Another process loads all values from the files.

    def save(self, name: str, value: object) -> None:
        """Write a value to a file of the work folder: bytes unchanged, an array as .npy, other types with pickle."""
        with open_atomically(Path(self.folder, name), durable=False) as file:
            if isinstance(value, bytes):
                file.write(value)
            elif isinstance(value, np.ndarray):
                np.save(file, value)
            else:
                pickle.dump(value, file)

    def load(self, name: str) -> Any:
        """Return the value that `save` wrote to a file of the work folder. Arrays are memory-mapped."""
        path = Path(self.folder, name)
        return np.load(path, mmap_mode="r") if path.suffix == ".npy" else pickle.loads(path.read_bytes())

    @cached_property
    def plan(self) -> Plan:
        return self.load("plan")

    @cached_property
    def assignment(self) -> Assignment:
        return self.load("assignment")

    @cached_property
    def tokenizer(self) -> StreamTokenizer:
        """Return the tokenizer that `prepare` trained or copied to the work folder."""
        return StreamTokenizer(self.folder)

    @cached_property
    def _given_tokenizer(self) -> Optional[StreamTokenizer]:
        # tokenizer for a new stream (``--tokenizer``); None if `prepare` trains a tokenizer
        given = self.plan.options.tokenizer if self.plan.there is None else None
        return None if given is None else StreamTokenizer(given)

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        # 600,000 cached chunks are the limit for all workers together.
        return DocumentEncoder(self.tokenizer, 600_000 // self.plan.num_workers)

    @cached_property
    def _held_out(self) -> HeldOutNgrams:
        return HeldOutNgrams(*map(self.load, _NGRAMS))

    @cached_property
    def _counts(self) -> np.ndarray:
        # number of new training documents with each held-out n-gram, plus 11 if it is in half of these documents
        counts, num_trained = np.zeros(len(self._held_out.hashes), np.int64), 0
        for piece in range(len(self.plan.pieces)):
            places, numbers, num_documents = self.load(f"counts-{piece:05d}")
            counts[places] += numbers
            num_trained += num_documents
        counts[counts >= max(COMMON_IN_HELD_OUT, num_trained / 2)] += COMMON_IN_TRAINING
        return counts

    @cached_property
    def _rare(self) -> np.ndarray:
        # whether each held-out n-gram is in few training documents, including those of earlier calls
        counts, hashes = self._counts.copy(), self._held_out.hashes
        for known in self._known(_NGRAM_COUNTS):
            before, numbers = known.reshape(2, -1)
            _, places, others = np.intersect1d(hashes, before, assume_unique=True, return_indices=True)
            counts[places] += numbers[others].astype(np.int64)
        return counts < COMMON_IN_TRAINING

    def ngram_counts(self) -> np.ndarray:
        """Return ``(2, n-grams)``, uint64: hash and count of each held-out n-gram in new training documents."""
        found = np.flatnonzero(self._counts)
        return np.stack([self._held_out.hashes[found], self._counts[found].astype(np.uint64)])

    def _known(self, folder: str) -> Iterator[np.ndarray]:
        # the numbers that each earlier call wrote to a folder of the stream
        if (there := self.plan.there) is not None:
            for file in there.other_files:
                if file.path.startswith(f"{folder}/"):
                    file.verify(there.root)
                    yield np.fromfile(there.root / file.path, "<u8")

    def _sets(self, number: int) -> np.ndarray:
        sets = np.array(self.load(f"sets-{number:05d}.npy"))
        sets[sets == len(self.assignment.names)] = 0  # The training text of the tokenizer belongs to mega-batch 0.
        return sets

    def _trained_ngrams(self, documents: list[str], sets: np.ndarray) -> tuple[np.ndarray, Ngrams]:
        # (indices of the training documents, their n-grams)
        trained = np.flatnonzero((sets >= 0) & (sets < self.assignment.num_megabatches))
        texts = [documents[each] for each in trained.tolist()]
        return trained, ngrams_of(texts, self.plan.options.decontaminate_ngram)

    def digest(self, number: int) -> Iterator[str]:
        """Yield one value, the sha256 of input file ``number``."""
        yield file_sha256(self.plan.sources[number].path)

    def hash(self, number: int) -> Iterator[int]:
        """Write (hash, sort key, size, INPUT or group) of each document in a piece. Yield the bytes read per batch."""
        options = self.plan.options
        groups: dict[str, int] = {}
        parts, num_documents = [np.empty(0, _HASHED)], 0
        for batch in batches_of(self.plan.pieces[number]):
            numbers = [groups.setdefault(group, len(groups)) for group in batch.groups]
            _refuse_many_groups(len(groups))
            own = np.empty(len(batch.documents), _HASHED)
            own["hash"] = document_hashes(batch.documents)
            own["bytes"] = [len(document.encode()) for document in batch.documents]
            own["argument"] = batch.arguments if options.by is None else numbers
            positions = np.arange(len(own), dtype=np.uint64) + np.uint64((number << 32) + num_documents)
            own["key"] = keys_of(own["hash"], options.seed, positions if options.keep_duplicates else None)
            num_documents += len(own)
            parts.append(own)
            yield batch.bytes_read
        self.save(f"hashed-{number:05d}", (list(groups), np.concatenate(parts)))

    def assign(self) -> None:
        """Drop duplicates and assign all other documents to sets, with less than 64 bytes of memory per document.

        Raises:
            AlmaError: an input or a set has no document, all documents are duplicates, or there are too many groups.
        """
        plan, options, there = self.plan, self.plan.options, self.plan.there
        hashed = [self.load(f"hashed-{piece:05d}") for piece in range(len(plan.pieces))]
        groups = self._ordered_groups({group for names, _ in hashed for group in names} if options.by else set())
        place = {group: number for number, group in enumerate(groups)}
        for names, records in hashed if options.by else ():
            records["argument"] = np.array([place[name] for name in names], np.uint16)[records["argument"]]
        bounds = np.cumsum([len(records) for _, records in hashed])
        records = np.concatenate([records for _, records in hashed])
        del hashed
        documents_of_argument = np.bincount(records["argument"], minlength=len(options.inputs))
        for source in plan.sources:
            if not (len(records) if options.by else documents_of_argument[source.argument]):
                raise AlmaError(
                    f"{source.label}: the file contains no document; remove the file from the input, or add text"
                )
        # Documents with equal keys stay in the order of their INPUTs or groups, and in input order within these.
        order = np.lexsort((records["argument"], records["key"]))
        keys = records["key"][order]
        is_kept = np.ones(len(order), bool)
        if not options.keep_duplicates:
            is_kept[1:] = keys[1:] != keys[:-1]
        for hashes in () if options.keep_duplicates else self._known(_DOCUMENTS):
            known = keys_of(hashes, options.seed)
            places = np.searchsorted(keys, known).clip(max=len(keys) - 1)
            is_kept[places[keys[places] == known]] = False
        del keys
        order = order[is_kept]
        if not len(order):
            raise TooLittleTextError(
                f"INPUT: the stream already contains all {len(records):,} documents; give other text, or "
                "--keep-duplicates"
            )
        self.save(_DOCUMENTS, records["hash"][order].tobytes())
        sizes, arguments = records["bytes"][order], records["argument"][order]
        num_duplicates = len(records) - len(order)
        duplicate_bytes = int(records["bytes"].sum(dtype=np.int64) - sizes.sum(dtype=np.int64))
        del records
        first = there.num_megabatches if there else 0
        shares = Shares(
            options.megabatches or len(groups),
            options.one_per_input or options.by is not None,
            options.preset == "paper",
            options.valid_bytes,
            options.test_bytes,
            there.history[0]["options"].get("--holdout-bytes") if there and there.history else options.holdout_bytes,
            options.tokenizer_bytes,
            first,
        )
        if (total := first + shares.num_megabatches) > MAX_MEGABATCHES:
            raise AlmaError(
                f"--append: expected at most {MAX_MEGABATCHES:,} mega-batches, found {total:,} "
                f"({shares.num_megabatches:,} new); append fewer"
            )
        own_sets = assign(sizes, arguments, shares)
        arriving = range(first, first + shares.num_megabatches)
        names = [*map(split_name, arriving), *(["valid", "test"] if first == 0 else [])]
        names += [] if shares.holdout is None else [split_name(t, "holdout") for t in arriving]
        first_bytes = int(sizes[(own_sets == 0) | (own_sets == shares.num_sets)].sum(dtype=np.int64))
        self.save(
            "assignment",
            Assignment(names, shares.num_megabatches, groups, num_duplicates, duplicate_bytes, first_bytes),
        )
        counts = np.bincount(own_sets, minlength=shares.num_sets + 1)
        counts[0] += counts[-1]
        self.refuse_empty_sets(counts[:-1].tolist())
        sets = np.full(len(is_kept), DROPPED, np.int16)
        sets[order] = own_sets
        for piece, part in enumerate(np.split(sets, bounds[:-1])):
            self.save(f"sets-{piece:05d}.npy", part)

    def _ordered_groups(self, names: set[str]) -> list[str]:
        plan = self.plan
        _refuse_many_groups(len(names))
        history = [] if plan.there is None else plan.there.history
        known = dict(pair for each in history for pair in zip(each.get("groups", ()), each["splits"], strict=False))
        if again := sorted(names & {*known}):
            raise AlmaError(
                f"--by {plan.options.by}: the stream {plan.options.out} already has groups: {', '.join(again[:3])} "
                f"({again[0]} is {known[again[0]]}); remove the documents of these groups from "
                "the input, or give --megabatches instead of --by"
            )
        is_numeric = all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names)
        return sorted(names, key=lambda name: (int(name), name) if is_numeric else name)

    def refuse_empty_sets(self, counts: Sequence[int], num_dropped: int = 0) -> None:
        """Raise TooLittleTextError if a set has no document.

        Args:
            counts: number of documents of each set.
            num_dropped: number of documents dropped because they repeat held-out text.
        """
        if all(counts):
            return
        empty, assigned, groups = [*counts].index(0), self.assignment, self.assignment.groups
        name = assigned.names[empty] + (f" ({groups[empty]})" if empty < len(groups) else "")
        num_megabatches = assigned.num_megabatches
        advice = "--no-decontaminate" if num_dropped else "--format lines if each line is a document"
        trained, held_out = sum(counts[:num_megabatches]), sum(counts[num_megabatches:])
        raise TooLittleTextError(
            f"{name}: no document is left; found {trained:,} training documents for {num_megabatches} mega-batches, "
            f"{held_out:,} held out, {assigned.num_duplicates:,} duplicates, {num_dropped:,} dropped because they "
            f"repeat held-out text; give more text, fewer mega-batches, smaller held-out sets, or {advice}"
        )

    def _read_again(self, piece: int, marks: np.ndarray) -> Iterator[tuple[list[str], np.ndarray, int]]:
        """Yield (documents, slice of ``marks``, bytes read) per batch. Raises AlmaError if a file has changed."""
        first = 0
        for batch in batches_of(self.plan.pieces[piece]):
            own = marks[first : first + len(batch.documents)]
            if len(own) < len(batch.documents):
                raise _changed(batch.label)
            yield batch.documents, own, batch.bytes_read
            first += len(own)
        if first < len(marks):  # otherwise, the command could report that no document is left
            raise _changed(self.plan.pieces[piece][-1].source.label)

    def sample(self, number: int) -> Iterator[int]:
        """Write the tokenizer training text and the held-out n-grams of a piece. Yield the bytes read per block."""
        plan, num_sets = self.plan, len(self.assignment.names)
        sets = self.load(f"sets-{number:05d}.npy")
        marks = np.zeros(len(sets), np.uint8)
        tokenizer = self._given_tokenizer
        if plan.options.ngram is not None or tokenizer is not None:
            marks[sets >= self.assignment.num_megabatches] = _HELD_OUT
        marks[sets == num_sets] = _TOKENIZER_TEXT if plan.there is None and tokenizer is None else 0
        texts: list[str] = []
        # Held-out documents that the given tokenizer alters, all held-out documents, decoded letters, all letters.
        losses = np.zeros(4, np.int64)
        ngrams = list[np.ndarray]()
        for documents, own, num_bytes in self._read_again(number, marks) if marks.any() else ():
            texts += [documents[each] for each in np.flatnonzero(own == _TOKENIZER_TEXT)]
            held_out = [documents[each] for each in np.flatnonzero(own == _HELD_OUT)]
            ngrams += distinct_of_each(ngrams_of(held_out, plan.options.decontaminate_ngram), len(held_out))
            if tokenizer is not None:
                decoded = tokenizer.decode_batch(tokenizer.encode_batch(held_out))
                altered = document_hashes(decoded) != document_hashes(held_out)
                letters = [sum(len("".join(text.split())) for text in texts) for texts in (decoded, held_out)]
                losses += [altered.sum(), len(held_out), *letters]
            yield num_bytes
        self.save(f"sample-{number:05d}", (texts, ngrams, losses))

    def prepare(self) -> None:
        """Merge all held-out n-grams, also of the stream to extend. Train a tokenizer, or copy the existing one.

        Raises:
            AlmaError: ``--tokenizer`` encodes less than half of the held-out text.
        """
        plan, options = self.plan, self.plan.options
        samples = [f"sample-{piece:05d}" for piece in range(len(plan.pieces))]
        if options.ngram is not None:
            held_out = [ngrams for name in samples for ngrams in self.load(name)[1]]
            if plan.there is not None:
                held_out += held_out_ngrams(plan.there, options.ngram)
            merged = HeldOutNgrams.of(held_out)
            for name, array in zip(_NGRAMS, (merged.hashes, merged.owners, merged.sizes), strict=True):
                self.save(name, array)
        given = options.tokenizer if plan.there is None else plan.there.root / TOKENIZER_FOLDER
        if given is None:
            size = vocab_size_for(self.assignment.first_bytes) if options.vocab_size == AUTO else options.vocab_size
            tokenizer_json = train_tokenizer((self.load(name)[0] for name in samples), size, plan.num_workers)
            self.save(FILE_NAMES["tokenizers"], tokenizer_json)
            return
        altered, num_held_out, kept, size = sum(self.load(name)[2] for name in samples).tolist()
        if 2 * kept < size:
            raise AlmaError(f"{given}: encodes only {kept:,} of {size:,} characters; give another tokenizer")
        if altered:
            print_line(
                f"note: {given}: {altered:,} of {num_held_out:,} held-out documents lose letters or digits that the "
                "tokenizer does not know; bits per byte is too low, and --append does not find copies of the documents",
                sys.stderr,
            )
        tokenizer = StreamTokenizer(given)
        self.save(FILE_NAMES[tokenizer.kind], tokenizer.file.read_bytes())
        for path in tokenizer.companions:
            self.save(path.name, path.read_bytes())

    def count(self, number: int) -> Iterator[int]:
        """Write the numbers of training documents of a piece: with each held-out n-gram, and in all.

        Yield the bytes read per block.
        """
        found, num_documents, sets = [np.empty(0, np.int64)], 0, self._sets(number)
        for documents, own, num_bytes in self._read_again(number, sets) if self.plan.options.ngram is not None else ():
            trained, ngrams = self._trained_ngrams(documents, own)
            found.append(self._held_out.find_shared(ngrams)[1])
            num_documents += len(trained)
            yield num_bytes
        places, numbers = np.unique(np.concatenate(found), return_counts=True)
        self.save(f"counts-{number:05d}", (places, numbers, num_documents))

    def encode(self, number: int) -> Iterator[Encoded]:
        """Yield the encoded documents of each block of a piece. Drop training documents that repeat held-out text."""
        ngram = self.plan.options.ngram
        for documents, own, num_bytes in self._read_again(number, self._sets(number)):
            dropped: list[dict[str, Any]] = []
            if ngram is not None:
                trained, ngrams = self._trained_ngrams(documents, own)
                copies, starts = self._held_out.find_copies(ngrams, self._rare)
                for each, start in zip(trained[copies].tolist(), starts.tolist(), strict=True):
                    own[each], text = DROPPED, documents[each]
                    begins, shared = " ".join(text[:80].split()), ngram_at(text, start, ngram)
                    dropped.append({"bytes": len(text.encode()), "begins": begins, "ngram": shared})
            order = np.argsort(own, kind="stable")
            order = order[np.searchsorted(own[order], 0) :]  # Dropped documents come first.
            texts = [documents[each] for each in order.tolist()]
            ids = self._encoder.encode(texts)
            counts = [
                (len(text.encode()), len(text.split()), len(each) // self._encoder.dtype.itemsize)
                for text, each in zip(texts, ids, strict=True)
            ]
            yield Encoded(num_bytes, own[order], np.array(counts, np.int64).reshape(-1, 3), ids, dropped)


def _refuse_many_groups(number: int) -> None:
    if number > MAX_MEGABATCHES:
        raise AlmaError(
            f"--by: expected at most {MAX_MEGABATCHES:,} values (mega-batches), found {number:,}; give "
            "another field, or for dates a longer --period"
        )


def write_stream(work: Work, root: Path, blocks: Iterable[Encoded], record: Mapping[str, Any]) -> Stream:
    """Write the files of a new stream, or the additional files of a stream, to a folder. Do not write the manifest.

    Args:
        work: steps of the command; all steps before ``encode`` are complete.
        root: folder for the files.
        blocks: encoded documents of each block, in input order.
        record: record of the command, see `record_of`.

    Returns:
        The new or extended stream.

    Raises:
        AlmaError: every document of a mega-batch repeats held-out text.
    """
    plan, assignment, tokenizer = work.plan, work.assignment, work.tokenizer
    writers = [TokenFileWriter(root, name, id_dtype(tokenizer.vocab_size)) for name in assignment.names]
    counts = np.zeros((len(writers), 4), np.int64)  # documents, bytes, words, tokens
    listed: list[dict[str, Any]] = []
    num_dropped = bytes_dropped = pending = 0
    for block in blocks:
        numbers, firsts = np.unique(block.sets, return_index=True)
        for number, first, end in zip(numbers.tolist(), firsts, np.append(firsts, len(block.sets))[1:], strict=True):
            own, ids = block.counts[first:end], b"".join(block.ids[first:end])
            counts[number] += [len(own), *own.sum(axis=0)]
            writers[number].write(ids, own[:, 2])
            pending += len(ids)
        listed += block.dropped[: 1000 - len(listed)]  # The manifest lists at most 1,000 documents.
        num_dropped += len(block.dropped)
        bytes_dropped += sum(each["bytes"] for each in block.dropped)
        if pending > 1 << 26:  # bytes that all writers together buffer
            pending = 0
            for writer in writers:
                writer.flush()
    work.refuse_empty_sets(counts[:, 0].tolist(), num_dropped)
    splits = [
        Split(writer.name, writer.close(), documents, words, tokens, num_bytes)
        for writer, (documents, num_bytes, words, tokens) in zip(writers, counts.tolist(), strict=True)
    ]
    history: dict[str, Any] = {
        **record,
        "num_duplicates": assignment.num_duplicates,
        "duplicate_bytes": assignment.duplicate_bytes,
        "splits": assignment.names,
    }
    if assignment.groups:
        history["groups"] = assignment.groups
    if plan.options.ngram is not None:
        history |= {"num_contaminated": num_dropped, "contaminated_bytes": bytes_dropped, "contaminated": listed}
    if (stream := plan.there) is None:
        files = [
            _write(root, f"{TOKENIZER_FOLDER}/{path.name}", path.read_bytes())
            for path in (tokenizer.file, *tokenizer.companions)
        ]
        entry = TokenizerEntry.describe(tokenizer.kind, tokenizer.vocab_size, files)
        dictionary = _write(root, DICTIONARY, tokenizer.dictionary.encode())
        stream = Stream(plan.options.out, "text", plan.options.seed, (), entry, dictionary)
    known = {_DOCUMENTS: Path(work.folder, _DOCUMENTS).read_bytes()}
    if plan.options.ngram is not None:
        known[_NGRAM_COUNTS] = work.ngram_counts().tobytes()
    others = [_write(root, f"{folder}/{len(stream.history):03d}.u64", content) for folder, content in known.items()]
    by_name = {split.name: split for split in [*stream.splits, *splits]}
    names = split_names(
        "text", stream.num_megabatches + assignment.num_megabatches, split_name(0, "holdout") in by_name
    )
    return replace(
        stream,
        splits=tuple(by_name[name] for name in names),
        other_files=(*stream.other_files, *others),
        history=(*stream.history, history),
    )


def _write(root: Path, name: str, content: bytes) -> StreamFile:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return StreamFile.describe(root, name)
