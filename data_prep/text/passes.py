"""Passes over the input: a task for each piece, whose result is a file that appears when it is whole.

So a pass can be done by any number of processes in any order, and what a killed command has done is not done again.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generator, Iterator, Mapping, Optional, Sequence

import numpy as np

from data_prep.compression import DecompressedFile
from data_prep.text.document import Block, documents_of
from data_prep.text.pieces import BLOCK_SIZE, Piece, Source
from data_prep.text.pool import Progress, Workers
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.terminal import LiveLine, spell_duration, tell


@dataclass(frozen=True)
class PieceTask:
    """What one task of a pass gets.

    Attributes:
        piece: what it reads.
        folder: where it writes.
        marks: ``(documents,)``, uint8: what to do with each document, or empty before they are known.
    """

    piece: Piece
    folder: Path
    marks: np.ndarray

    def blocks(self) -> Iterator[tuple[Source, Block, int]]:
        """Yield the blocks of the piece, each with its file and the number of bytes that are read with it."""
        for part in self.piece.parts:
            done = 0
            for block, position in part.blocks():
                yield part.source, block, position - done
                done = position

    def documents(self) -> Iterator[tuple[list[str], np.ndarray, int]]:
        """Yield the documents of each block, with their marks and the number of bytes that are read with it.

        Raises:
            AlmaError: there are not as many as there are marks.
        """
        first = 0
        for source, block, num_bytes in self.blocks():
            documents = documents_of(block)
            marks = self.marks[first : first + len(documents)]
            first += len(documents)
            if len(marks) < len(documents):
                raise _changed(source)
            yield documents, marks, num_bytes
        if first != len(self.marks):
            raise _changed(self.piece.parts[-1].source)


def _changed(source: Source) -> AlmaError:
    return AlmaError(
        f"{source.label}: changed while it was being read; give the command again when nothing writes to it"
    )


class PieceFunction:
    """What a pass does with a piece; `make` does it, unless ``result`` is there already."""

    result: str
    """Name of the file that is written last."""

    def __call__(self, task: PieceTask) -> Generator[Progress, None, None]:
        """Write the result of a piece where it is not there, and yield how far that is."""
        if (task.folder / self.result).exists():
            yield task.piece.size, 0
        else:
            yield from self.make(task)

    def make(self, task: PieceTask) -> Generator[Progress, None, None]:
        """Write the result of a piece, which is not there, and yield how far that is."""
        raise NotImplementedError


@dataclass(frozen=True)
class Passes:
    """The pieces of the input, who works on them, and where.

    Attributes:
        pieces: of the input, in order.
        folder: where what is made of them is kept.
        workers: processes.
    """

    pieces: Sequence[Piece]
    folder: Path
    workers: Workers

    @property
    def folders(self) -> list[Path]:
        """The folder of each piece."""
        return [self.folder / f"{number:05d}" for number in range(len(self.pieces))]

    def run(
        self, title: str, function: PieceFunction, marks: Sequence[np.ndarray] = (), num_words: int = 0
    ) -> Iterator[Path]:
        """Carry a pass out; yield the folder of each piece, in order, when its result is there.

        Args:
            title: what the pass does, for the line on the terminal.
            function: what is done with a piece.
            marks: of the documents of each piece.
            num_words: of the documents that the pass is about, for the line; 0 where the pieces say it.
        """
        none = np.empty(0, np.uint8)
        tasks = (
            PieceTask(piece, folder, marks[number] if marks else none)
            for number, (piece, folder) in enumerate(zip(self.pieces, self.folders, strict=True))
        )
        with PassProgress(title, sum(piece.size for piece in self.pieces), num_words) as progress:
            for folder, _ in zip(self.folders, self.workers.map(function, tasks, progress.update), strict=True):
                yield folder


def save_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays to a file that appears when it is whole."""
    with open_atomically(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_arrays(path: Path) -> Mapping[str, Any]:
    """Return what `save_arrays` wrote."""
    with np.load(path) as arrays:
        return dict(arrays)


def unpack(task: tuple[Source, Path]) -> Generator[Progress, None, None]:
    """Write the content of a compressed file, so that it can be read in pieces."""
    source, path = task
    if path.exists():
        yield source.size, 0
        return
    with DecompressedFile(source.path, source.label) as packed, open_atomically(path) as file:
        done = 0
        while content := packed.read(BLOCK_SIZE):
            file.write(content)
            yield packed.position - done, 0
            done = packed.position


class PassProgress:
    """Words per second and time left of one pass.

    Args:
        title: what the pass does.
        total: bytes of input files that it reads.
        num_words: see `Passes.run`.
    """

    def __init__(self, title: str, total: int, num_words: int = 0) -> None:
        self._title = title
        self._total = max(total, 1)
        self._num_words = num_words
        self._start = time.monotonic()
        self._bytes = self._words = 0
        self._line = LiveLine()
        self._line.is_due()  # nothing is known yet

    def __enter__(self) -> "PassProgress":
        return self

    def __exit__(self, kind: Optional[type], *exception: object) -> None:
        self._line.clear()
        if kind is None:
            self._words = self._num_words or self._words
            pace = f"{self._pace()}, " if self._words else ""
            tell(f"{self._title}: {pace}{self._seconds():.1f} s", sys.stderr)

    def update(self, progress: Progress) -> None:
        """Report that so many bytes and words more are done."""
        self._bytes += progress[0]
        self._words += progress[1]
        if self._line.is_due():
            fraction = min(self._bytes / self._total, 1.0)
            self._words = int(self._num_words * fraction) or self._words
            left = spell_duration(self._seconds() / max(fraction, 1e-9) * (1 - fraction))
            done = f"{self._title}: {100 * fraction:.0f} %"
            shorter = f"{done}, {left} left"
            pace = f"{done}, {self._pace()}, {left} left" if self._words else shorter
            self._line.show(pace, fraction, 1.0, [shorter])

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _pace(self) -> str:
        return f"{self._words:,} words, {self._words / self._seconds():,.0f} words/s"
