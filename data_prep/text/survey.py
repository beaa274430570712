"""The first pass: what is known of each document without keeping it, fourteen bytes."""

import hashlib
from dataclasses import dataclass
from typing import Generator, Iterable, Optional, Sequence

import numpy as np

from data_prep.text.document import documents_of, groups_of
from data_prep.text.passes import Passes, PieceFunction, PieceTask, load_arrays, save_arrays
from data_prep.text.pieces import Source
from data_prep.text.pool import Progress
from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES

MAX_DOCUMENTS = 2**32 - 2
"""They are numbered in 32 bits."""
_SAMPLING = np.uint64(0x5851F42D4C957F2D)  # so that who is drawn says nothing about who goes where


@dataclass(frozen=True)
class Survey:
    """All documents of the input in the order of reading.

    Attributes:
        hashes: ``(documents,)``, uint64: 64 bits of BLAKE2b over the text, equal for equal texts.
        words: ``(documents,)``, uint32: white-space separated words.
        arguments: ``(documents,)``, uint16: number of the command's argument that the document came with, or of its
            group.
        piece_sizes: documents in each piece of the input.
        groups: their names in the order of their numbers; none where documents are not put into groups.
        sampled: ``(documents,)``, bool: whether the document is among its input's share; None: all are.
    """

    hashes: np.ndarray
    words: np.ndarray
    arguments: np.ndarray
    piece_sizes: np.ndarray
    groups: tuple[str, ...] = ()
    sampled: Optional[np.ndarray] = None

    def __len__(self) -> int:
        return len(self.hashes)

    def by_piece(self, marks: np.ndarray) -> list[np.ndarray]:
        """Cut something of each document into what belongs to each piece."""
        return np.split(marks, np.cumsum(self.piece_sizes)[:-1])


class CountPiece(PieceFunction):
    """Note the hash, the number of words and the group, if there are any, of each document of a piece."""

    result = "counted.npz"

    def make(self, task: PieceTask) -> Generator[Progress, None, None]:
        """See `PieceFunction`."""
        digests, words, groups = bytearray(), [np.empty(0, np.uint32)], []
        numbers: dict[str, int] = {}
        per_source = dict.fromkeys((part.source for part in task.piece.parts), 0)
        for source, block, num_bytes in task.blocks():
            documents = documents_of(block)
            for document in documents:
                digests += hashlib.blake2b(document.encode(), digest_size=8).digest()
            counts = np.fromiter((len(document.split()) for document in documents), np.uint32, len(documents))
            words.append(counts)
            if block.group is not None:
                groups += [numbers.setdefault(name, len(numbers)) for name in groups_of(block)]
            per_source[source] += len(documents)
            yield num_bytes, int(counts.sum(dtype=np.int64))
        save_arrays(
            task.folder / self.result,
            hashes=np.frombuffer(bytes(digests), "<u8"),
            words=np.concatenate(words),
            groups=np.array(groups, np.int64),
            names=np.array([*numbers], "U"),
            per_source=np.array([*per_source.values()], np.int64),
        )


class _Groups:
    """Numbers of groups, in the order in which they are met."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def numbers_of(self, names: Sequence[str], label: str) -> np.ndarray:
        numbers = np.array([self.names.setdefault(str(name), len(self.names)) for name in names], np.uint16)
        if len(self.names) > MAX_MEGABATCHES:
            raise AlmaError(
                f"--by: {len(self.names):,} values found up to {label}, at most {MAX_MEGABATCHES:,} mega-batches; "
                "choose a longer --period, or another field"
            )
        return numbers

    def in_order(self, arguments: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the names in their order, and the documents' groups by it."""
        ordered = _in_order(self.names)
        place = {name: number for number, name in enumerate(ordered)}
        return tuple(ordered), np.array([place[name] for name in self.names], np.uint16)[arguments]


def survey_documents(passes: Passes, sources: Sequence[Source]) -> Survey:
    """Read the whole input once and count it.

    Args:
        passes: the input.
        sources: its files.

    Raises:
        AlmaError: an input is broken, no text, or holds no document at all; or there are too many documents or groups.
    """
    hashes: list[np.ndarray] = []
    words: list[np.ndarray] = []
    arguments: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    groups = _Groups()
    num_documents = 0
    documents_per_argument = dict.fromkeys((source.argument for source in sources), 0)
    for piece, folder in zip(passes.pieces, passes.run("counting words", CountPiece()), strict=True):
        counted = load_arrays(folder / CountPiece.result)
        hashes.append(counted["hashes"])
        words.append(counted["words"])
        of_piece = list(dict.fromkeys(part.source for part in piece.parts))
        for source, number in zip(of_piece, counted["per_source"].tolist(), strict=True):
            documents_per_argument[source.argument] += number
        first = np.cumsum(counted["per_source"]) - counted["per_source"]
        for source, start, number in zip(of_piece, first, counted["per_source"], strict=True):
            sampled.append(_sample(counted["hashes"][start : start + number], source.share))
        if sources[0].group is not None:
            arguments.append(groups.numbers_of(counted["names"], of_piece[-1].label)[counted["groups"]])
        else:
            of_source = np.array([source.argument for source in of_piece], np.uint16)
            arguments.append(np.repeat(of_source, counted["per_source"]))
        num_documents += len(counted["hashes"])
        if num_documents > MAX_DOCUMENTS:
            raise AlmaError(f"INPUT: more than {MAX_DOCUMENTS:,} documents; join short ones, or make several streams")
    for source in sources:
        if not documents_per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    names: tuple[str, ...] = ()
    numbers = np.concatenate(arguments)
    if groups.names:
        names, numbers = groups.in_order(numbers)
    return Survey(
        np.concatenate(hashes),
        np.concatenate(words),
        numbers,
        np.array([len(each) for each in hashes], np.int64),
        names,
        np.concatenate(sampled) if any(source.share < 1 for source in sources) else None,
    )


def _sample(hashes: np.ndarray, share: float) -> np.ndarray:
    """Draw documents by their content: copies are drawn together, and a larger share holds a smaller one."""
    if share == 1:
        return np.ones(len(hashes), bool)
    return scrambled(hashes ^ _SAMPLING) < np.uint64(int(share * 2**64))


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of groups: whole numbers by their size, others by their characters, as dates are written."""
    names = list(names)
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
