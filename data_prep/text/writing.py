"""What follows the last pass: sort each piece's tokens by the sets, then write the files of the sets, one a task."""

import json
from dataclasses import dataclass
from typing import Any, Generator, Iterator, Sequence

import numpy as np

from data_prep.text.buckets import records_of
from data_prep.text.deal import DROPPED
from data_prep.text.encoding import ENCODED, TOKENS, encoder_of, last_cuts_of, sets_of
from data_prep.text.passes import SingleStep, Step, Work
from data_prep.text.pool import Progress
from data_prep.text.survey import COUNTED
from data_prep.text.training import tokenizer_of
from fairseq_alma.data.manifest import TOKEN_SUFFIXES, Split, StreamFile
from fairseq_alma.data.stream import holdout_name, megabatch_name, shard_name
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS, TokenFileWriter, id_dtype

_PLACED, _SIZES, _TOTALS, _HASHES = "placed.bin", "sizes.bin", "totals.npz", "hashes.bin"
_LAYOUT = "layout.json"
_AT_ONCE = 1 << 16  # documents
_COUNTS = ("documents", "words", "tokens", "bytes")


def names_of(work: Work) -> list[str]:
    """Return the names of the sets that a command makes, in the order of their numbers."""
    cuts = work.once(last_cuts_of)
    first = 0 if work.there is None else work.there.num_megabatches
    numbers = range(first, first + cuts.num_megabatches)
    held_out = ["valid", "test"] if cuts.held_out else []
    return [*map(megabatch_name, numbers), *held_out, *(map(holdout_name, numbers) if cuts.slices else ())]


class PlacePieces(Step):
    """Sort the tokens of a piece by the sets."""

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.of_piece(number).exists(_TOTALS)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`."""
        folder, num_sets = work.of_piece(number), len(work.once(names_of))
        sets, words = sets_of(work, number)
        order = np.argsort(sets, kind="stable")
        order = order[np.searchsorted(sets[order], 0) :]  # without what is dropped
        last = np.searchsorted(sets[order], np.arange(num_sets), side="right")
        encoded = folder.load(ENCODED)
        sizes, width = encoded["sizes"].astype(np.int64), work.once(encoder_of).dtype.itemsize
        ends = np.cumsum(sizes) * width
        tokens = memoryview(folder.read(TOKENS))
        placed = np.append(0, np.cumsum(sizes[order]))[last]
        folder.save_slices(_PLACED, placed * width, *_sorted(tokens, ends - sizes * width, ends, order))
        folder.save_slices(_SIZES, last * 4, sizes[order].astype("<i4").tobytes())
        kept = records_of(work, number)["row"]
        hashes = folder.load(COUNTED, "hashes")["hashes"][kept]
        folder.write(_HASHES, hashes.tobytes())
        folder.save(
            _TOTALS,
            documents=np.diff(last, prepend=0),
            tokens=np.diff(placed, prepend=0),
            words=_total(sets, words, num_sets),
            bytes=_total(sets, encoded["num_bytes"], num_sets),
        )
        folder.remove(TOKENS)
        yield 0, 0


def _sorted(tokens: memoryview, starts: np.ndarray, ends: np.ndarray, order: np.ndarray) -> Iterator[bytes]:
    for first in range(0, len(order), _AT_ONCE):
        some = order[first : first + _AT_ONCE]
        pairs = zip(starts[some].tolist(), ends[some].tolist(), strict=True)
        yield b"".join([tokens[start:end] for start, end in pairs])


def _total(sets: np.ndarray, weights: np.ndarray, num_sets: int) -> np.ndarray:
    kept = sets != DROPPED
    return np.bincount(sets[kept], weights[kept], minlength=num_sets).astype(np.int64)


def hashes_of(work: Work) -> np.ndarray:
    """Return eight bytes of each document that is not dropped, by which ``--append`` knows it, ascending."""
    parts = (work.of_piece(number).read(_HASHES) for number in range(len(work.pieces)))
    hashes = np.frombuffer(bytearray().join(parts), "<u8")
    hashes.sort()
    return hashes


@dataclass(frozen=True)
class TokenFileSpan:
    """What a token file is made of.

    Attributes:
        name: its path in the stream without ``.bin`` and ``.idx``.
        of_set: number of the set.
        start: ids of the set before the first document that may be in it: those are in it that begin behind.
        end: they begin before this one; -1: all do.
        first_piece: the first piece that has ids of it.
        before: ids of the set in pieces before that one.
    """

    name: str
    of_set: int
    start: int = 0
    end: int = -1
    first_piece: int = 0
    before: int = 0


class LayOutFiles(SingleStep):
    """Decide what files there are."""

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.folder.exists(_LAYOUT)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`."""
        names, limit = work.once(names_of), work.options.shard_tokens
        totals = [work.of_piece(piece).load(_TOTALS) for piece in range(len(work.pieces))]
        counts = {each: np.sum([of_piece[each] for of_piece in totals], axis=0).tolist() for each in _COUNTS}
        reached = np.cumsum([of_piece["tokens"] for of_piece in totals], axis=0)
        files: list[Sequence[Any]] = []
        for of_set, name in enumerate(names):
            if limit is None or not name.endswith("/train"):
                files.append((name, of_set))
                continue
            for shard, start in enumerate(range(0, counts["tokens"][of_set], limit)):
                piece = int(np.searchsorted(reached[:, of_set], start, side="right"))
                before = int(reached[piece - 1, of_set]) if piece else 0
                files.append((shard_name(name, shard), of_set, start, start + limit, piece, before))
        work.folder.write(_LAYOUT, json.dumps({"files": files, "counts": counts}).encode())
        yield 0, 0


def layout_of(work: Work) -> tuple[list[TokenFileSpan], dict[str, list[int]]]:
    """Return the files that are written, and what is counted of each set."""
    layout = json.loads(work.folder.read(_LAYOUT))
    return [TokenFileSpan(*each) for each in layout["files"]], layout["counts"]


class WriteFiles(Step):
    """Write a token file of a set."""

    title = "writing"

    def num_tasks(self, work: Work) -> int:
        """See `Step`."""
        return len(work.once(layout_of)[0])

    def size(self, work: Work, number: int) -> int:
        """See `Step`."""
        return 1

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`: it is described, and there."""
        name = work.once(layout_of)[0][number].name
        return work.folder.exists(_described(number)) and all(work.out.exists(f"{name}{end}") for end in TOKEN_SUFFIXES)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`."""
        file = work.once(layout_of)[0][number]
        vocab_size = work.once(tokenizer_of).vocab_size
        counts = np.zeros(vocab_size + NUM_FAIRSEQ_SYMBOLS, np.int64)
        counted = work.there is None and file.of_set == 0  # mega-batch 0: dict.txt tells how often each id occurs
        dtype = id_dtype(vocab_size)
        with work.out.writing(f"{file.name}.bin") as tokens, work.out.writing(f"{file.name}.idx") as index:
            writer = TokenFileWriter(tokens, index, dtype)
            for ids, sizes in _parts(work, file, dtype):
                writer.write(ids, sizes)
                if counted:
                    counts += np.bincount(ids, minlength=len(counts))
            digests = writer.close()
        entries = [
            {"path": f"{file.name}{suffix}", "size": size, "sha256": digest}
            for suffix, (size, digest) in zip(TOKEN_SUFFIXES, digests, strict=True)
        ]
        content = {"files": entries, "counts": counts[NUM_FAIRSEQ_SYMBOLS:].tolist() if counted else []}
        work.folder.write(_described(number), json.dumps(content).encode())
        yield 1, 0


def _parts(work: Work, file: TokenFileSpan, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids that each piece gives to a file, and how many each document has."""
    num_sets, before = len(work.once(names_of)), file.before
    for piece in range(file.first_piece, len(work.pieces)):
        if 0 <= file.end <= before:
            return
        folder = work.of_piece(piece)
        sizes = np.frombuffer(folder.load_slice(_SIZES, file.of_set, num_sets), "<i4")
        ends = before + np.cumsum(sizes, dtype=np.int64)
        starts = ends - sizes
        first = int(np.searchsorted(starts, file.start))
        last = len(starts) if file.end < 0 else int(np.searchsorted(starts, file.end))
        if first < last:
            ids = np.frombuffer(folder.load_slice(_PLACED, file.of_set, num_sets), dtype)
            yield ids[int(starts[first]) - before : int(ends[last - 1]) - before], sizes[first:last]
        before = int(ends[-1]) if len(ends) else before


def _described(number: int) -> str:
    return f"file-{number:05d}.json"


def splits_of(work: Work) -> tuple[list[Split], np.ndarray]:
    """Return the sets with their files, and how often each token occurs in mega-batch 0 where a stream is made."""
    names = work.once(names_of)
    files, counts = work.once(layout_of)
    of_sets: list[list[StreamFile]] = [[] for _ in names]
    id_counts = np.zeros(work.once(tokenizer_of).vocab_size, np.int64)
    for number, file in enumerate(files):
        described = json.loads(work.folder.read(_described(number)))
        of_sets[file.of_set] += [StreamFile(**each) for each in described["files"]]
        if described["counts"]:
            id_counts += described["counts"]
    of_set = zip(*(counts[each] for each in _COUNTS), strict=True)
    return [
        Split(*each) for each in zip(names, map(tuple, of_sets), *zip(*of_set, strict=True), strict=True)
    ], id_counts
