"""The four functions that make a stream of text, for any number of workers or machines: hash, cut, sample, encode.

*Hash*: each piece of the input gives the hash, the bytes and the position of its documents, ordered by key. *Cut*: one
256th of the keys at a time, the document with the smallest position of each hash is kept, and the sets follow from sums
of bytes. *Sample*: the documents of the held-out sets and of the tokenizer's sample alone are read again, as their
n-grams and the tokenizer must be known before anything is written. *Encode*: every document is read once more and its
tokens go to where it belongs. No function calls one before it; they exchange files in the work folder.
"""

import functools
import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import numpy as np

from data_prep.text.assignment import DROPPED, NUM_PREFIXES, Cuts, KeyOrder, Shares, cut, keys_of, prefix_bounds
from data_prep.text.documents import (
    Piece,
    Source,
    blocks_of,
    cut_into_pieces,
    documents_and_groups_of,
    documents_of,
)
from data_prep.text.encoder import DocumentEncoder
from data_prep.text.options import AUTO, FORMS_OF_TEXT, HOLDOUT_BYTES, PrepOptions
from data_prep.text.source import find_sources
from data_prep.text.tokenizer import train_tokenizer, vocab_size_for
from fairseq_alma.data.ngrams import NgramHasher, NgramSet, distinct, document_hashes, held_out_ngrams
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.data.tokens import FILE_NAMES, TOKENIZER_FOLDER, StreamTokenizer, id_dtype
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES, open_atomically

MAX_DOCUMENTS = 2**32 - 2
MAX_LISTED = 1000
"""Documents that are left out and described in the manifest."""
_HASHED = np.dtype([("hash", "<u8"), ("bytes", "<u4"), ("row", "<u4"), ("argument", "<u2")])
_KEPT = np.dtype([("key", "<u8"), ("position", "<i8"), ("bytes", "<u4"), ("argument", "<u2")])
_CACHED_CHUNKS = 600_000  # of the encoders of all workers together
_SHOWN = 80  # characters of a document that is left out


@dataclass(frozen=True)
class Plan:
    """What all functions need to know.

    Attributes:
        stamps: of the input files, when the plan was made.
        there: the stream to append to; None: one is made.
        num_workers: processes that share the memory of a machine.
    """

    options: PrepOptions
    sources: tuple[Source, ...]
    pieces: tuple[Piece, ...]
    stamps: tuple[tuple[int, int], ...]
    there: Optional[Stream] = None
    num_workers: int = 1

    def refuse_changes(self) -> None:
        """Raise AlmaError if an input file changed since the plan was made."""
        for source, stamp in zip(self.sources, self.stamps, strict=True):
            if source.stamp != stamp:
                raise _changed(source.label)


def make_plan(
    options: PrepOptions, there: Optional[Stream], folder: str, copies: Optional[Path], num_workers: int
) -> Plan:
    """Find the input and write the plan into the work folder; pipes are copied to ``copies``, without it refused.

    Raises:
        AlmaError: an input cannot be read, or lacks the fields that options name.
    """
    sources = tuple(
        find_sources(options.inputs, options.form, options.text_field, copies, options.out, options.by, options.period)
    )
    text = [f"{source.label} is plain text, which has no fields" for source in sources if source.form in FORMS_OF_TEXT]
    if options.by is not None and text:
        raise AlmaError(f"--by {options.by}: {text[0]}; give JSON lines or Parquet")
    if options.field is not None and len(text) == len(sources):
        raise AlmaError(f"--field {options.field}: {text[0]}; leave --field out, or give --format")
    pieces, stamps = tuple(cut_into_pieces(sources)), tuple(source.stamp for source in sources)
    plan = Plan(options, sources, pieces, stamps, there, min(num_workers, len(pieces)))
    _write(folder, "plan.pickle", pickle.dumps(plan))
    return plan


def _changed(label: str) -> AlmaError:
    return AlmaError(f"{label}: changed while it was being read; give the command again when nothing writes to it")


@functools.lru_cache(maxsize=1)
def plan_of(folder: str) -> Plan:
    """Return the plan in a work folder, which a process reads once."""
    return pickle.loads(Path(folder, "plan.pickle").read_bytes())


def _write(folder: str, name: str, content: bytes) -> None:
    with open_atomically(Path(folder, name), durable=False) as file:
        file.write(content)


def _save(folder: str, name: str, array: np.ndarray) -> None:
    with open_atomically(Path(folder, name), durable=False) as file:
        np.save(file, array)


def digest_source(folder: str, number: int) -> Iterator[str]:
    """Yield the sha256 of an input file."""
    yield file_sha256(plan_of(folder).sources[number].path)


def hash_piece(folder: str, number: int) -> Iterator[int]:
    """Write what is known of the documents of a piece, ordered by their keys; yield the bytes read for each block."""
    plan = plan_of(folder)
    hashes, sizes, arguments = [np.empty(0, "<u8")], [np.empty(0, "<u4")], [np.empty(0, "<u2")]
    groups: dict[str, int] = {}
    counts: dict[int, int] = {}
    for block, num_bytes in blocks_of(plan.pieces[number]):
        if plan.options.by is None:
            documents = documents_of(block)
            own = np.full(len(documents), block.source.argument if plan.options.one_per_input else 0, "<u2")
        else:
            pairs = documents_and_groups_of(block)
            documents = [document for document, _ in pairs]
            own = np.array([groups.setdefault(group, len(groups)) for _, group in pairs], "<u4")
            _refuse_many_groups(len(groups))
        hashes.append(document_hashes(documents))
        sizes.append(np.fromiter((len(document.encode()) for document in documents), "<u4", len(documents)))
        arguments.append(own)
        counts[block.source.argument] = counts.get(block.source.argument, 0) + len(documents)
        yield num_bytes
    records = np.zeros(sum(map(len, hashes)), _HASHED)
    records["hash"], records["bytes"] = np.concatenate(hashes), np.concatenate(sizes)
    records["argument"], records["row"] = np.concatenate(arguments), np.arange(len(records))
    keys = _keys(plan, number, records)
    order = np.argsort(keys, kind="stable")
    _write(folder, f"hashed-{number:05d}.bin", prefix_bounds(keys[order]).tobytes() + records[order].tobytes())
    _write(folder, f"counted-{number:05d}.json", json.dumps([list(groups), list(counts.items())]).encode())


def _refuse_many_groups(number: int) -> None:
    if number > MAX_MEGABATCHES:
        raise AlmaError(
            f"--by: {number:,} values found, at most {MAX_MEGABATCHES:,} mega-batches are possible; choose a longer "
            "--period, or another field"
        )


def _keys(plan: Plan, piece: int, records: np.ndarray) -> np.ndarray:
    positions = (np.uint64(piece) << np.uint64(32)) + records["row"] if plan.options.keep_duplicates else None
    return keys_of(records["hash"], plan.options.seed, positions)


def cut_documents(folder: str) -> None:
    """Drop what occurs again, and cut the order of the other documents into sets.

    Raises:
        AlmaError: an input holds no document, there are too many documents or groups, or they do not suffice.
    """
    plan = plan_of(folder)
    groups, places, piece_sizes = _survey(folder, plan)
    num_documents = sum(piece_sizes)
    num_arguments = len(groups) or (len(plan.options.inputs) if plan.options.one_per_input else 1)
    known_hashes = [np.empty(0, np.uint64)]  # of the documents that the stream to append to has
    if plan.there is not None and not plan.options.keep_duplicates:
        for file in plan.there.other_files:
            file.verify(plan.there.root)
            known_hashes.append(np.fromfile(plan.there.root / file.path, "<u8"))
    known = np.sort(keys_of(np.concatenate(known_hashes), plan.options.seed))
    bounds = prefix_bounds(known)
    sizes, hashes = np.zeros((NUM_PREFIXES, num_arguments), np.int64), []
    for prefix in range(NUM_PREFIXES):
        records, keys = _with_prefix(folder, plan, prefix, places, piece_sizes)
        is_kept = np.ones(len(keys), bool)
        if not plan.options.keep_duplicates:
            is_kept[1:] = keys["key"][1:] != keys["key"][:-1]
            is_kept &= ~np.isin(keys["key"], known[bounds[prefix] : bounds[prefix + 1]])
        kept = keys[is_kept]
        _write(folder, f"kept-{prefix:03d}.bin", kept.tobytes())
        sizes[prefix] = np.bincount(kept["argument"], kept["bytes"], num_arguments)
        hashes.append(records["hash"][is_kept])
    _write(folder, "document-hashes.u64", b"".join(each.tobytes() for each in hashes))
    num_kept = sum(map(len, hashes))
    if not num_kept:
        raise AlmaError(
            f"INPUT: all {num_documents:,} documents are in the stream already; give text that it does not have, or "
            "--keep-duplicates"
        )
    cuts = cut(KeyOrder(sizes, functools.partial(_kept, folder)), _shares(plan, groups))
    sets, counts, first_bytes = np.full(num_documents, DROPPED, np.int16), np.zeros(cuts.num_sets, np.int64), 0
    for prefix in range(NUM_PREFIXES):
        kept = _kept(folder, prefix)
        own = cuts.sets_of(kept["key"], kept["argument"])
        counts += np.bincount(own, minlength=cuts.num_sets)
        first_bytes += int(kept["bytes"][own == 0].sum(dtype=np.int64))
        own[(own == 0) & (kept["key"] <= np.uint64(cuts.sample))] = cuts.num_sets
        sets[kept["position"]] = own
    assignment = {
        "cuts": cuts,
        "groups": groups,
        "num_duplicates": num_documents - num_kept,
        "first_bytes": first_bytes,
    }
    refuse_empty_sets(assignment, counts.tolist(), num_kept)
    _save(folder, "sets.npy", sets)
    _write(
        folder, "assignment.json", json.dumps({**assignment, "cuts": asdict(cuts), "piece_sizes": piece_sizes}).encode()
    )


def _with_prefix(
    folder: str, plan: Plan, prefix: int, places: Sequence[np.ndarray], piece_sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of all pieces whose keys have a prefix, in the order of the keys: `_HASHED` and `_KEPT`."""
    parts, kept = [], []
    first = 0
    for piece, (place, size) in enumerate(zip(places, piece_sizes, strict=True)):
        path = Path(folder, f"hashed-{piece:05d}.bin")
        begin, end = np.fromfile(path, "<i8", count=2, offset=prefix * 8).tolist()
        head = (NUM_PREFIXES + 1) * 8
        part = np.fromfile(path, _HASHED, count=end - begin, offset=head + begin * _HASHED.itemsize)
        own = np.zeros(len(part), _KEPT)
        own["key"], own["bytes"], own["position"] = _keys(plan, piece, part), part["bytes"], first + part["row"]
        own["argument"] = place[part["argument"]] if len(place) else part["argument"]
        parts.append(part)
        kept.append(own)
        first += size
    records, keys = np.concatenate(parts), np.concatenate(kept)
    order = np.argsort(keys["key"], kind="stable")  # of equal keys the smallest position comes first
    return records[order], keys[order]


def _survey(folder: str, plan: Plan) -> tuple[list[str], list[np.ndarray], list[int]]:
    """Return the names of all groups in order, and per piece the places of its groups in them and its documents."""
    own: list[list[str]] = []
    per_argument = dict.fromkeys((source.argument for source in plan.sources), 0)
    names: dict[str, None] = {}
    sizes = []
    for piece in range(len(plan.pieces)):
        groups, counts = json.loads(Path(folder, f"counted-{piece:05d}.json").read_bytes())
        own.append(groups)
        names.update(dict.fromkeys(groups))
        sizes.append(sum(count for _, count in counts))
        for argument, count in counts:
            per_argument[argument] += count
    _refuse_many_groups(len(names))
    if sum(sizes) > MAX_DOCUMENTS:
        raise AlmaError(f"INPUT: more than {MAX_DOCUMENTS:,} documents; join short ones, or make several streams")
    for source in plan.sources:
        if not per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    history = [] if plan.there is None else plan.there.history
    known = [group for entry in history for group in entry.get("groups", ())]
    if again := sorted({*names} & {*known}):
        raise AlmaError(
            f"--by {plan.options.by}: {', '.join(again[:3])} came before and is mega-batch {known.index(again[0])} of "
            f"{plan.options.out}; leave those documents out, or append them with --megabatches"
        )
    is_numeric = all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names)
    ordered = sorted(names, key=lambda name: (int(name), name) if is_numeric else name)
    place = {name: number for number, name in enumerate(ordered)}
    return ordered, [np.array([place[name] for name in groups], np.uint16) for groups in own], sizes


def _kept(folder: str, prefix: int) -> np.ndarray:
    return np.fromfile(Path(folder, f"kept-{prefix:03d}.bin"), _KEPT)


def _shares(plan: Plan, groups: Sequence[str]) -> Shares:
    options, there = plan.options, plan.there
    holdout = options.holdout_bytes
    if there is not None and there.history:
        holdout = there.history[0]["options"].get(HOLDOUT_BYTES)
    return Shares(
        options.num_megabatches or len(groups),
        options.one_per_input or options.by is not None,
        there is None,
        options.preset == "paper",
        options.valid_bytes,
        options.test_bytes,
        holdout,
        options.training[1],
    )


def refuse_empty_sets(assignment: Mapping[str, Any], counts: Sequence[int], num_documents: int, why: str = "") -> None:
    """Raise AlmaError if one of the sets, of ``counts`` documents, has none; ``why`` if not for ``num_documents``."""
    if all(counts):
        return
    cuts, groups, empty = assignment["cuts"], assignment["groups"], [*counts].index(0)
    held_out = {cuts.num_megabatches: "the validation set", cuts.num_megabatches + 1: "the test set"}
    name = held_out.get(empty, f"mega-batch {empty}" + (f" ({groups[empty]})" if empty < len(groups) else ""))
    flag = f"--megabatches {cuts.num_megabatches}"
    advice = "give fewer mega-batches, more text, or choose --format lines if each line is a document"
    if cuts.by_argument:
        flag = "--by" if groups else "--one-per-input"
        advice = "leave out what repeats others, give more text, or smaller --valid-bytes and --test-bytes"
    if why:
        advice = "give other text, or --no-decontaminate"
    raise AlmaError(f"{flag}: {why or f'{num_documents:,} documents'} leave {name} without a document; {advice}")


@functools.lru_cache(maxsize=1)
def assignment_of(folder: str) -> dict[str, Any]:
    """Return what `cut_documents` wrote, its cuts as `Cuts`."""
    assignment = json.loads(Path(folder, "assignment.json").read_bytes())
    return {**assignment, "cuts": Cuts(**assignment["cuts"])}


def _sets(folder: str, piece: int) -> np.ndarray:
    """Return the set of each document of a piece, int16: -1 if it is dropped, B' if in the sample, of B' sets."""
    sizes = assignment_of(folder)["piece_sizes"]
    first = sum(sizes[:piece])
    return np.load(Path(folder, "sets.npy"), mmap_mode="r")[first : first + sizes[piece]]


def _reread(folder: str, piece: int, marks: np.ndarray) -> Iterator[tuple[list[str], np.ndarray, int]]:
    """Yield the documents of each block with their marks and the bytes read; refuse another number than there was."""
    first, source = 0, None
    for block, num_bytes in blocks_of(plan_of(folder).pieces[piece]):
        documents, source = documents_of(block), block.source
        if first + len(documents) > len(marks):
            break
        yield documents, marks[first : first + len(documents)], num_bytes
        first += len(documents)
    else:
        if first == len(marks):
            return
    raise _changed("INPUT" if source is None else source.label)


_CHOSEN, _HELD_OUT = 1, 2


def sample_piece(folder: str, number: int) -> Iterator[int]:
    """Write the documents of a piece that are in the tokenizer's sample, and the n-grams of those that are held out."""
    plan, cuts = plan_of(folder), assignment_of(folder)["cuts"]
    sets = _sets(folder, number)
    marks = np.zeros(len(sets), np.uint8)
    if plan.options.ngram is not None:
        marks[sets >= cuts.num_megabatches] = _HELD_OUT
    marks[sets == cuts.num_sets] = _CHOSEN if plan.there is None and plan.options.tokenizer is None else 0
    chosen: list[str] = []
    hashes, hasher = [], NgramHasher(plan.options.decontaminate_ngram)
    for documents, own, num_bytes in _reread(folder, number, marks) if marks.any() else ():
        chosen += [documents[each] for each in np.flatnonzero(own == _CHOSEN)]
        hashes.append(hasher([documents[each] for each in np.flatnonzero(own == _HELD_OUT)]).hashes)
        yield num_bytes
    _write(folder, f"sample-{number:05d}.json", json.dumps(chosen).encode())
    _save(folder, f"ngrams-{number:05d}.npy", distinct(hashes))


def prepare_encoding(folder: str) -> None:
    """Write the tokenizer, trained or given, and the n-grams of all that is held out."""
    plan, pieces = plan_of(folder), range(len(plan_of(folder).pieces))
    if plan.options.ngram is not None:
        parts = [np.load(Path(folder, f"ngrams-{piece:05d}.npy")) for piece in pieces]
        if plan.there is not None:
            parts.append(held_out_ngrams(plan.there, plan.options.ngram))
        _save(folder, "ngrams.npy", distinct(parts))
    if plan.there is not None or plan.options.tokenizer is not None:
        given = plan.options.tokenizer if plan.there is None else plan.there.root / TOKENIZER_FOLDER
        assert given is not None
        tokenizer = StreamTokenizer(given)
        kind, content = tokenizer.kind, tokenizer.file.read_bytes()
        for path in tokenizer.companions:
            _write(folder, path.name, path.read_bytes())
    else:
        kind, _, vocab_size = plan.options.training
        vocab_size = vocab_size_for(assignment_of(folder)["first_bytes"]) if vocab_size == AUTO else vocab_size
        samples = (json.loads(Path(folder, f"sample-{piece:05d}.json").read_bytes()) for piece in pieces)
        content = train_tokenizer(kind, samples, vocab_size, plan.num_workers)
    _write(folder, FILE_NAMES[kind], content)


@functools.lru_cache(maxsize=1)
def tokenizer_of(folder: str) -> StreamTokenizer:
    """Return the tokenizer in a work folder."""
    (file,) = (Path(folder, name) for name in FILE_NAMES.values() if Path(folder, name).exists())
    return StreamTokenizer(file)


@functools.lru_cache(maxsize=1)
def _encoder_of(folder: str) -> DocumentEncoder:
    tokenizer = tokenizer_of(folder)
    return DocumentEncoder(tokenizer, id_dtype(tokenizer.vocab_size), _CACHED_CHUNKS // plan_of(folder).num_workers)


@functools.lru_cache(maxsize=1)
def _held_out_of(folder: str) -> NgramSet:
    return NgramSet(np.load(Path(folder, "ngrams.npy"), mmap_mode="r"))  # which all workers share


def forget() -> None:
    """Forget what this process has read of work folders."""
    for function in (plan_of, assignment_of, tokenizer_of, _encoder_of, _held_out_of):
        function.cache_clear()


@dataclass
class Encoded:
    """The documents of a block in the order of their sets.

    Attributes:
        bytes_read: of the input.
        sets: ``(documents,)``, int16, ascending.
        counts: ``(documents, 3)``, int64: bytes, words and tokens of each.
        ids: the ids of each document, in the bytes of a token file.
        left_out: bytes, first words and n-gram of each document that shares one with what is held out.
    """

    bytes_read: int
    sets: np.ndarray
    counts: np.ndarray
    ids: list[bytes]
    left_out: list[dict[str, Any]]


def encode_piece(folder: str, number: int) -> Iterator[Encoded]:
    """Encode the documents of a piece, without those that share n-grams with what is held out."""
    plan, cuts, encoder = plan_of(folder), assignment_of(folder)["cuts"], _encoder_of(folder)
    sets = np.array(_sets(folder, number))
    sets[sets == cuts.num_sets] = 0  # the sample of mega-batch 0
    for documents, own, num_bytes in _reread(folder, number, sets):
        left_out: list[dict[str, Any]] = []
        if plan.options.ngram is not None:
            own, left_out = _without_shared(folder, documents, own, cuts.num_megabatches)
        order = np.argsort(own, kind="stable")
        order = order[np.searchsorted(own[order], 0) :]  # without what is dropped
        ordered = [documents[each] for each in order.tolist()]
        ids = encoder.encode(ordered)
        width = encoder.dtype.itemsize
        counts = [
            (len(text.encode()), len(text.split()), len(each) // width) for text, each in zip(ordered, ids, strict=True)
        ]
        yield Encoded(num_bytes, own[order], np.array(counts, np.int64).reshape(-1, 3), ids, left_out)


def _without_shared(
    folder: str, documents: Sequence[str], sets: np.ndarray, num_megabatches: int
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Mark the documents to train on that share an n-gram with what is held out as dropped, and describe them."""
    hasher = NgramHasher(plan_of(folder).options.decontaminate_ngram)
    looked_at = np.flatnonzero((sets >= 0) & (sets < num_megabatches))
    ngrams = hasher([documents[number] for number in looked_at.tolist()])
    found = _held_out_of(folder).find(ngrams.hashes)
    owners, places = np.unique(ngrams.documents[found], return_index=True)
    numbers, starts = looked_at[owners].tolist(), ngrams.starts[found[places]].tolist()
    sets = sets.copy()
    sets[numbers] = DROPPED
    return sets, [
        {
            "bytes": len(documents[number].encode()),
            "begins": " ".join(documents[number][:_SHOWN].split()),
            "ngram": hasher.words(documents[number], start),
        }
        for number, start in zip(numbers, starts, strict=True)
    ]
