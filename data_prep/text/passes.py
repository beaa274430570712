"""Steps of the work: tasks that do not depend on each other, whose results are files that appear when they are whole.

So a step can be done by any number of processes in any order, and what a killed command has done is not done again. The
files stand in a `Folder`, here or on a store: ours, as fsspec writes in place where a folder is local, and commits half
of a file where an error ends the writing.
"""

import errno
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Callable, Generator, Iterator, Mapping, Optional, Sequence, TypeVar, Union

import numpy as np

from data_prep.compression import DecompressedFile
from data_prep.text.options import HOLDOUT_BYTES, PrepOptions, Words
from data_prep.text.pieces import BLOCK_SIZE, Block, Piece, Source, documents_of
from data_prep.text.pool import Progress, Workers
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.terminal import LiveLine, spell_duration, tell

_OFFSET = np.dtype("<i8")


@dataclass(frozen=True)
class Folder:
    """A folder for what is between input and stream.

    Attributes:
        address: of the folder.
    """

    address: str

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.address}/{name}")

    def exists(self, name: str) -> bool:
        """Tell whether a file is there."""
        return os.path.exists(self._path(name))

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.path.getsize(self._path(name))

    def read(self, name: str, start: int = 0, end: Optional[int] = None) -> bytes:
        """Return what a file holds between two of its bytes."""
        with open(self._path(name), "rb", buffering=0) as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing that is there when the block ends, and never if it raises."""
        with open_atomically(Path(self._path(name))) as file:
            yield file

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as file:
            file.write(content)

    def remove(self, name: str) -> None:
        """Remove a file, which need not be there."""
        Path(self._path(name)).unlink(missing_ok=True)

    def move_to(self, path: Path) -> None:
        """Move all files to an empty folder of this file system, or copy them where that is not possible."""
        try:
            os.rename(self.address, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copytree(self.address, path, dirs_exist_ok=True)

    def here(self, name: str) -> Path:
        """Return the path of a file."""
        return Path(self._path(name))

    def save(self, name: str, **arrays: np.ndarray) -> None:
        """Write arrays to a file, ``.npz``."""
        with self.writing(name) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def load(self, name: str, *names: str) -> Mapping[str, Any]:
        """Return arrays that `save` wrote: those of some names, or all."""
        with np.load(self._path(name)) as arrays:
            return {each: arrays[each] for each in names or arrays.files}

    def save_slices(self, name: str, ends: Union[Sequence[int], np.ndarray], *parts: Any) -> None:
        """Write bytes, and before them where each of their slices ends."""
        with self.writing(name) as file:
            file.write(np.array([len(ends), 0, *ends], _OFFSET).tobytes())
            for part in parts:
                file.write(part)

    def load_slice(self, name: str, number: int, num_slices: int) -> bytes:
        """Return one slice of what `save_slices` wrote."""
        return self.load_some(name, range(number, number + 1), num_slices)[0]

    def load_some(self, name: str, numbers: range, num_slices: int) -> list[bytes]:
        """Return some slices of what `save_slices` wrote, which follow each other."""
        width, first = _OFFSET.itemsize, (num_slices + 2) * _OFFSET.itemsize
        ends = np.frombuffer(self.read(name, (numbers[0] + 1) * width, (numbers[-1] + 3) * width), _OFFSET).tolist()
        start, end = ends[0], ends[-1]
        content = self.read(name, first + start, first + end) if end > start else b""
        return [content[one - start : other - start] for one, other in pairwise(ends)]

    def load_slices(self, name: str) -> bytes:
        """Return all slices of what `save_slices` wrote as one."""
        content = self.read(name)
        return content[(int.from_bytes(content[: _OFFSET.itemsize], "little") + 2) * _OFFSET.itemsize :]

    def _path(self, name: str) -> str:
        return f"{self.address}/{name}"


Known = TypeVar("Known")


@dataclass(frozen=True)
class Work:
    """What a command is about, and where its steps leave what the next ones need.

    Attributes:
        options: of the command.
        sources: the input.
        pieces: of the input, in order.
        folder: for what is between input and stream.
        out: where the files of the stream are made.
        there: the stream to append to; None: one is made.
        num_workers: processes that share the memory of a machine.
    """

    options: PrepOptions
    sources: Sequence[Source]
    pieces: Sequence[Piece]
    folder: Folder
    out: Folder
    there: Optional[Stream] = None
    num_workers: int = 1
    _known: dict[Callable, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    @property
    def holdout_bytes(self) -> Optional[Words]:
        """Words to hold out of each mega-batch, by what the stream began with."""
        if self.there is None:
            return self.options.holdout_bytes
        return self.there.history[0]["options"].get(HOLDOUT_BYTES) if self.there.history else None

    def of_piece(self, number: int) -> Folder:
        """Return the folder of a piece."""
        return self.folder / f"{number:05d}"

    def once(self, load: Callable[["Work"], Known]) -> Known:
        """Return what a function makes of the work, which a process asks once."""
        if load not in self._known:
            self._known[load] = load(self)
        return self._known[load]

    def blocks(self, number: int) -> Iterator[tuple[Source, Block, int]]:
        """Yield the blocks of a piece, each with its file and the number of bytes that are read with it."""
        for part in self.pieces[number].parts:
            done = 0
            for block, position in part.blocks():
                yield part.source, block, position - done
                done = position

    def documents(self, number: int, marks: np.ndarray) -> Iterator[tuple[list[str], np.ndarray, int]]:
        """Yield the documents of each block of a piece, with their marks and the number of bytes that are read with it.

        Args:
            number: of the piece.
            marks: ``(documents,)``: what to do with each document of it.

        Raises:
            AlmaError: there are not as many documents as there are marks.
        """
        first = 0
        for source, block, num_bytes in self.blocks(number):
            documents = documents_of(block)
            of_block = marks[first : first + len(documents)]
            first += len(documents)
            if len(of_block) < len(documents):
                raise _changed(source)
            yield documents, of_block, num_bytes
        if first != len(marks):
            raise _changed(self.pieces[number].parts[-1].source)


def _changed(source: Source) -> AlmaError:
    return AlmaError(
        f"{source.label}: changed while it was being read; give the command again when nothing writes to it"
    )


class Step:
    """A part of the work: tasks that any process can do, in any order, once the steps before it are done.

    What else it is told are the attributes of its class, so that it needs nothing but its name.
    """

    title: str = ""
    """What the tasks do, for a line on the terminal; empty: they are done at once."""
    takes_memory: bool = False
    """Whether its only task is better done in a process that ends with it."""
    leaves: str = ""
    """The file that is there when a task is done."""

    def num_tasks(self, work: Work) -> int:
        """Return the number of tasks: one for each piece, unless a step says otherwise."""
        return len(work.pieces)

    def size(self, work: Work, number: int) -> int:
        """Return the bytes of input that a task has done when it is done."""
        return work.pieces[number].size if self.title else 0

    def num_words(self, work: Work) -> int:
        """Return the words that all tasks are about; 0: each says so itself."""
        return 0

    def folder_of(self, work: Work, number: int) -> Folder:
        """Return the folder in which a task leaves a file: that of a piece, unless a step says otherwise."""
        return work.of_piece(number)

    def is_done(self, work: Work, number: int) -> bool:
        """Tell whether what a task makes is there."""
        return self.folder_of(work, number).exists(self.leaves)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """Do a task that is not done, and yield how far it is."""
        raise NotImplementedError


class SingleStep(Step):
    """A step of one task, which joins what the tasks before have left."""

    def num_tasks(self, work: Work) -> int:
        return 1

    def folder_of(self, work: Work, number: int) -> Folder:
        return work.folder


@dataclass(frozen=True)
class Task:
    """Do tasks of a step, those that are not done yet, by their number."""

    step: Step
    work: Work

    def __call__(self, number: int) -> Generator[Progress, None, None]:
        """Do a task, and yield how far it is."""
        if self.step.is_done(self.work, number):
            yield self.step.size(self.work, number), 0
        else:
            yield from self.step.make(self.work, number)


def carry_out(step: Step, work: Work, workers: Workers) -> None:
    """Do all tasks of a step that are not done yet."""
    numbers = range(step.num_tasks(work))
    if step.takes_memory and numbers:
        workers.run_apart(Task(step, work), 0)
    elif not step.title or not numbers:
        for _ in (workers if len(numbers) > 1 else Workers(1)).map(Task(step, work), numbers):
            pass
    else:
        _carry_out_long(step, work, workers, numbers)


def _carry_out_long(step: Step, work: Work, workers: Workers, numbers: range) -> None:
    total = sum(step.size(work, number) for number in numbers)
    with PassProgress(step.title, total, step.num_words(work)) as progress:
        for _ in workers.map(Task(step, work), numbers, progress.update):
            pass


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
