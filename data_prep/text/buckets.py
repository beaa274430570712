"""The first pass, which keeps no document, and the random order of all documents, which no process could hold.

The order stands in buckets of the leading bits of keys. A document's key is a random number that follows from its text
and the seed. *Map*: for each piece of the input, write its documents in the order of their keys. *Reduce*: for each
bucket, read what all pieces have there, drop equal documents, sum words. Where the words of the order reach a number
(`KeyOrder.end`) then follows from the sums of the buckets and from one bucket alone. Source of the scheme: Dean and
Ghemawat 2004.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Callable, Generator, Iterable, Optional, Sequence

import numpy as np

from data_prep.text.passes import Folder, SingleStep, Step, Work
from data_prep.text.pieces import documents_of, groups_of
from data_prep.text.pool import Progress
from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES

MAX_DOCUMENTS = 2**32 - 2
"""They are numbered in 32 bits."""
COUNTED = "counted.npz"
_SURVEY = "survey.json"


class CountPieces(Step):
    """Note the hash, the number of words and the group, if there are any, of each document of a piece."""

    title = "counting"
    leaves = COUNTED

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        digests, words, groups = bytearray(), [np.empty(0, np.uint32)], []
        numbers: dict[str, int] = {}
        per_source = dict.fromkeys((part.source for part in work.pieces[number].parts), 0)
        for source, block, num_bytes in work.blocks(number):
            documents = documents_of(block)
            encoded = [document.encode() for document in documents]
            for each in encoded:
                digests += hashlib.blake2b(each, digest_size=8).digest()
            counts = np.fromiter(map(len, encoded), np.uint32, len(documents))
            words.append(counts)
            if block.group is not None:
                groups += [numbers.setdefault(name, len(numbers)) for name in groups_of(block)]
            per_source[source] += len(documents)
            yield num_bytes, 0
        hashes = np.frombuffer(bytes(digests), "<u8")
        sizes = np.array([*per_source.values()], np.int64)
        work.of_piece(number).save(
            COUNTED,
            hashes=hashes,
            words=np.concatenate(words),
            groups=np.array(groups, np.int64),
            names=np.array([*numbers], "U"),
            per_source=sizes,
        )


@dataclass(frozen=True)
class Survey:
    """What is known of all documents together once they are counted.

    Attributes:
        piece_sizes: documents in each piece of the input.
        groups: names of the groups in the order of their numbers; none where documents are not put into groups.
    """

    piece_sizes: Sequence[int]
    groups: Sequence[str] = ()

    @property
    def num_documents(self) -> int:
        """Documents of the input."""
        return sum(self.piece_sizes)


def survey_of(work: Work) -> Survey:
    """Return what `SurveyInput` found."""
    return Survey(**json.loads(work.folder.read(_SURVEY)))


class SurveyInput(SingleStep):
    """Join what was counted."""

    leaves = _SURVEY

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`.

        Raises:
            AlmaError: an input holds no document at all, or there are too many documents or groups.
        """
        work.folder.write(_SURVEY, json.dumps(asdict(_survey(work))).encode())
        yield 0, 0


def _survey(work: Work) -> Survey:
    sizes = []
    groups: dict[str, int] = {}
    per_argument = dict.fromkeys((source.argument for source in work.sources), 0)
    for number, piece in enumerate(work.pieces):
        counted = work.of_piece(number).load(COUNTED, "per_source", "names")
        of_piece = list(dict.fromkeys(part.source for part in piece.parts))
        for source, size in zip(of_piece, counted["per_source"].tolist(), strict=True):
            per_argument[source.argument] += size
        for name in counted["names"].tolist():
            groups.setdefault(name, len(groups))
        if len(groups) > MAX_MEGABATCHES:
            raise AlmaError(
                f"--by: {len(groups):,} values found up to {of_piece[-1].label}, at most {MAX_MEGABATCHES:,} "
                "mega-batches; choose a longer --period, or another field"
            )
        sizes.append(int(counted["per_source"].sum()))
    if sum(sizes) > MAX_DOCUMENTS:
        raise AlmaError(f"INPUT: more than {MAX_DOCUMENTS:,} documents; join short ones, or make several streams")
    for source in work.sources:
        if not per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    _refuse_known_groups(work, groups)
    return Survey(sizes, _in_order(groups))


def _refuse_known_groups(work: Work, groups: Iterable[str]) -> None:
    """Raise AlmaError if a value of ``--by`` is a mega-batch of the stream already."""
    known = [] if work.there is None else [group for entry in work.there.history for group in entry.get("groups", ())]
    again = sorted({*groups} & {*known})
    if again:
        raise AlmaError(
            f"--by {work.options.by}: {', '.join(again[:3])} came before and is mega-batch {known.index(again[0])} of "
            f"{work.options.out}; leave those documents out, or append them with --megabatches"
        )


def arguments_of(work: Work, number: int) -> np.ndarray:
    """Return the number of the argument that each document of a piece came with, or of its group: ``(documents,)``."""
    counted = work.of_piece(number).load(COUNTED, "per_source", "groups", "names")
    if work.options.by is None:
        of_source = [source.argument for source in dict.fromkeys(part.source for part in work.pieces[number].parts)]
        return np.repeat(np.array(of_source, np.uint16), counted["per_source"])
    place = {name: each for each, name in enumerate(work.once(survey_of).groups)}
    return np.array([place[name] for name in counted["names"].tolist()], np.uint16)[counted["groups"]]


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of groups: whole numbers by their size, others by their characters, as dates are written."""
    names = list(names)
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


KEYED = np.dtype([("key", "<u8"), ("words", "<u4"), ("row", "<u4"), ("argument", "<u2")])
"""What is known of a document: its key, words, number in its piece, and argument or group where these are dealt."""
LAST_KEY = 2**64 - 1
_BUCKET_DOCUMENTS = 1 << 17
_MOST_BITS = 12
_KEYED, _KNOWN, _DROPPED, _KEPT, _TOTALS = "keyed.bin", "known.bin", "dropped.bin", "kept.bin", "totals.npz"
_HASHES_AT_ONCE = 1 << 20
_PIECES_AT_ONCE = 256


def num_buckets(work: Work) -> int:
    """Return how many buckets there are: a power of two, which decides nothing about the result."""
    full = work.once(survey_of).num_documents // _BUCKET_DOCUMENTS
    return 1 << min(full.bit_length(), _MOST_BITS)


def _bucket(work: Work, number: int) -> Folder:
    return work.folder / f"bucket-{number:05d}"


def _by_bucket(keys: np.ndarray, number: int) -> np.ndarray:
    """Return where each of some buckets ends in keys that ascend."""
    firsts = np.arange(1, number, dtype=np.uint64) << np.uint64(64 - (number - 1).bit_length())
    return np.append(np.searchsorted(keys, firsts), len(keys))


class KeyDocuments(Step):
    """Write the documents of a piece, and the hashes that an earlier command has kept, in the order of their keys."""

    def num_tasks(self, work: Work) -> int:
        return len(work.pieces) + len(_known_files(work))

    def is_done(self, work: Work, number: int) -> bool:
        known = number >= len(work.pieces)
        return work.of_piece(number).exists(_KNOWN if known else _KEYED)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        if number < len(work.pieces):
            records = _records(work, number)
            records = records[np.argsort(records["key"], kind="stable")]
            ends = _by_bucket(records["key"], num_buckets(work)) * KEYED.itemsize
            work.of_piece(number).save_slices(_KEYED, ends, records.tobytes())
        else:
            assert work.there is not None
            file = _known_files(work)[number - len(work.pieces)]
            file.verify(work.there.root)
            hashes = np.fromfile(work.there.root / file.path, "<u8")
            keys = np.sort(_random_keys(hashes, work.options.seed))
            work.of_piece(number).save_slices(_KNOWN, _by_bucket(keys, num_buckets(work)) * 8, keys.tobytes())
        yield 0, 0


def _known_files(work: Work) -> tuple:
    return () if work.there is None or work.options.keep_duplicates else work.there.other_files


def _records(work: Work, number: int) -> np.ndarray:
    """Return what is known of the documents of a piece, in the order of the piece."""
    survey, options = work.once(survey_of), work.options
    counted = work.of_piece(number).load(COUNTED, "hashes", "words")
    rows = np.arange(len(counted["words"]))
    records = np.zeros(len(rows), KEYED)
    first = sum(survey.piece_sizes[:number])
    position = np.arange(first, first + len(rows), dtype=np.uint64) if options.keep_duplicates else None
    records["key"] = _random_keys(counted["hashes"], options.seed, position)
    records["words"], records["row"] = counted["words"], rows
    if options.is_given_apart:
        records["argument"] = arguments_of(work, number)
    return records


def _random_keys(hashes: np.ndarray, seed: int, positions: Optional[np.ndarray] = None) -> np.ndarray:
    """Turn hashes into random numbers, by the seed; by positions among all documents too where contents repeat.

    Without positions this is one to one.
    """
    own = scrambled(np.array([seed], np.uint64))
    keys = np.empty(len(hashes), np.uint64)
    for start in range(0, len(hashes), _HASHES_AT_ONCE):
        part = slice(start, start + _HASHES_AT_ONCE)
        keys[part] = scrambled(hashes[part] ^ own)
        if positions is not None:
            keys[part] = scrambled(keys[part] + positions[part])
    return keys


class ReduceBuckets(Step):
    """Drop what occurs again in a bucket, and sum the words of what is left."""

    leaves = _TOTALS

    def num_tasks(self, work: Work) -> int:
        return num_buckets(work)

    def folder_of(self, work: Work, number: int) -> Folder:
        return _bucket(work, number)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        numbers = range(len(work.pieces))
        parts = [_load(work, piece, _KEYED, number, KEYED) for piece in numbers]
        records = np.concatenate(parts)
        pieces = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
        del parts
        order = np.argsort(records["key"], kind="stable")  # so that the first in the order of reading comes first
        records, pieces = records[order], pieces[order]
        kept = np.ones(len(records), bool)
        if not work.options.keep_duplicates:
            kept[1:] = records["key"][1:] != records["key"][:-1]
            for known in range(len(work.pieces), len(work.pieces) + len(_known_files(work))):
                keys = _load(work, known, _KNOWN, number, np.dtype("<u8"))
                kept &= ~np.isin(records["key"], keys, kind="sort")
        dropped, owners = records["row"][~kept], pieces[~kept]
        by_piece = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[by_piece], np.asarray(numbers), side="right") * dropped.itemsize
        folder = _bucket(work, number)
        folder.save_slices(_DROPPED, ends, dropped[by_piece].tobytes())
        folder.write(_KEPT, records[kept].tobytes())
        words, documents = _totals(records[kept], num_arguments(work))
        folder.save(_TOTALS, words=words, documents=documents, num_dropped=np.array(len(dropped)))
        yield 0, 0


def num_arguments(work: Work) -> int:
    """Return how many arguments, or groups, are dealt apart; 1 where all documents are dealt together."""
    if not work.options.is_given_apart:
        return 1
    return work.options.num_megabatches or len(work.once(survey_of).groups)


def _totals(records: np.ndarray, num_arguments: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the words and the documents of each argument, ``(arguments,)``, int64."""
    documents = np.bincount(records["argument"], minlength=num_arguments).astype(np.int64)
    words = np.bincount(records["argument"], records["words"], num_arguments).astype(np.int64)
    return words, documents


class GatherDropped(Step):
    """Put what the buckets have dropped of some pieces into one file: no piece has to look into all buckets."""

    def num_tasks(self, work: Work) -> int:
        return -(-len(work.pieces) // _PIECES_AT_ONCE)

    def is_done(self, work: Work, number: int) -> bool:
        return work.folder.exists(_of_pieces(number))

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        pieces = range(len(work.pieces))[number * _PIECES_AT_ONCE :][:_PIECES_AT_ONCE]
        buckets = [_bucket(work, bucket) for bucket in range(num_buckets(work))]
        parts = zip(*(bucket.load_some(_DROPPED, pieces, len(work.pieces)) for bucket in buckets), strict=True)
        rows = [b"".join(of_piece) for of_piece in parts]
        work.folder.save_slices(_of_pieces(number), np.cumsum([len(each) for each in rows]), *rows)
        yield 0, 0


def _of_pieces(number: int) -> str:
    return f"dropped-{number:05d}.bin"


def records_of(work: Work, number: int) -> np.ndarray:
    """Return the documents of a piece, without those that occurred before: `KEYED`."""
    records = np.frombuffer(work.of_piece(number).load_slices(_KEYED), KEYED)
    group, place = divmod(number, _PIECES_AT_ONCE)
    in_group = min(_PIECES_AT_ONCE, len(work.pieces) - group * _PIECES_AT_ONCE)
    dropped = np.frombuffer(work.folder.load_slice(_of_pieces(group), place, in_group), "<u4")
    return records[~np.isin(records["row"], dropped)] if len(dropped) else records


class KeyOrder:
    """All documents in the order of their keys, of which only the buckets are loaded that are asked about.

    Args:
        words: ``(buckets, arguments)``, int64: words of the documents of each argument.
        documents: the same of their number.
        load: returns the documents of a bucket, `KEYED`, their keys ascending.
    """

    def __init__(self, words: np.ndarray, documents: np.ndarray, load: Callable[[int], np.ndarray]) -> None:
        self.words, self.documents = words, documents
        self._load = load
        self._loaded = -1, np.empty(0, KEYED)
        self._summed: tuple[Any, tuple[np.ndarray, np.ndarray]] = (None, (self._loaded[1], self._loaded[1]))

    @property
    def num_words(self) -> int:
        """Words of all documents."""
        return int(self.words.sum())

    @property
    def num_documents(self) -> int:
        """Number of all documents."""
        return int(self.documents.sum())

    def without(self, left_out: np.ndarray) -> "KeyOrder":
        """Return the order without some of its documents, `KEYED`."""
        left_out = left_out[np.argsort(left_out["key"])]
        ends = _by_bucket(left_out["key"], len(self.words))
        parts = np.split(left_out, ends[:-1])
        totals = [_totals(part, self.words.shape[1]) for part in parts]
        words, documents = (np.array(each) for each in zip(*totals, strict=True))

        def load(bucket: int) -> np.ndarray:
            records = self._of(bucket)
            return records[~np.isin(records["key"], parts[bucket]["key"], kind="sort")]

        return KeyOrder(self.words - words, self.documents - documents, load)

    def end(self, target: float, argument: Optional[int] = None, including: Optional[bool] = None) -> int:
        """Return a key up to which the documents have a number of words; -1: that is before all of them.

        With documents of 3, 3 and 4 words the targets 0, 5 and 7 are nearest to the ends of none, two and two of them.

        Args:
            target: the words.
            argument: of whose documents; None: of all.
            including: whether the document that reaches the target is one of them; None: if that is nearer to it.
        """
        of_bucket = self._column(self.words, argument)
        reached = np.cumsum(of_bucket)
        bucket = int(np.searchsorted(reached, target))
        if bucket == len(reached):
            return LAST_KEY
        keys, ends = self._documents(bucket, argument)
        ends = ends + (reached[bucket] - of_bucket[bucket])
        last = int(np.searchsorted(ends, target))  # the document that reaches it
        before = int(ends[last - 1]) if last else int(reached[bucket] - of_bucket[bucket])
        if including is None:
            including = not target - before < int(ends[last]) - target
        return int(keys[last]) - (not including)

    def reached(self, key: int, argument: Optional[int] = None) -> tuple[int, int]:
        """Return the words and the number of the documents up to a key and with it, see `end`."""
        words, documents = self._column(self.words, argument), self._column(self.documents, argument)
        if key in (-1, LAST_KEY):
            return (int(words.sum()), int(documents.sum())) if key > 0 else (0, 0)
        bucket = key * len(words) // (LAST_KEY + 1)
        keys, ends = self._documents(bucket, argument)
        number = int(np.searchsorted(keys, np.uint64(key), side="right"))
        within = int(ends[number - 1]) if number else 0
        return int(words[:bucket].sum()) + within, int(documents[:bucket].sum()) + number

    def _column(self, table: np.ndarray, argument: Optional[int]) -> np.ndarray:
        return table.sum(axis=1) if argument is None else table[:, argument]

    def _documents(self, bucket: int, argument: Optional[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a bucket's documents, and their words up to each."""
        if self._summed[0] != (bucket, argument):
            records = self._of(bucket)
            if argument is not None:
                records = records[records["argument"] == argument]
            keys = np.ascontiguousarray(records["key"])
            self._summed = (bucket, argument), (keys, np.cumsum(records["words"], dtype=np.int64))
        return self._summed[1]

    def _of(self, bucket: int) -> np.ndarray:
        if self._loaded[0] != bucket:
            self._loaded = bucket, self._load(bucket)
        return self._loaded[1]


def key_order_of(work: Work) -> KeyOrder:
    """Return the documents that `ReduceBuckets` has kept."""
    totals = [_bucket(work, number).load(_TOTALS, "words", "documents") for number in range(num_buckets(work))]

    def load(bucket: int) -> np.ndarray:
        return np.frombuffer(_bucket(work, bucket).read(_KEPT), KEYED)

    return KeyOrder(
        np.array([each["words"] for each in totals]), np.array([each["documents"] for each in totals]), load
    )


def num_duplicates_of(work: Work) -> int:
    """Return how many documents were dropped because they occurred before."""
    return work.once(survey_of).num_documents - work.once(key_order_of).num_documents


def _load(work: Work, piece: int, name: str, bucket: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(work.of_piece(piece).load_slice(name, bucket, num_buckets(work)), dtype)
