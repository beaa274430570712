"""What the tasks of one command leave for each other: files that appear when they are whole, here or on a store.

Ours, as fsspec writes in place where a folder is local, and commits half of a file where an error ends the writing.
"""

import errno
import functools
import io
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Iterator, Mapping, Optional, Sequence, Union

import numpy as np

from data_prep.compression import store_of
from fairseq_alma.files import open_atomically

_OFFSET = np.dtype("<i8")


@dataclass(frozen=True)
class Folder:
    """A folder of a file system, or what stands for one behind an address that fsspec knows, as ``s3://bucket/work``.

    Attributes:
        address: of the folder.
    """

    address: str

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.address}/{name}")

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of a file system."""
        return "://" not in self.address

    def exists(self, name: str) -> bool:
        """Tell whether a file is there."""
        if self.is_local:
            return os.path.exists(self._path(name))
        store = _store(self.address)
        store.invalidate_cache()  # other processes write here
        return store.exists(self._path(name))

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.path.getsize(self._path(name)) if self.is_local else _store(self.address).size(self._path(name))

    def read(self, name: str, start: int = 0, end: Optional[int] = None) -> bytes:
        """Return what a file holds between two of its bytes."""
        if not self.is_local:
            return _store(self.address).cat_file(self._path(name), start=start, end=end)
        with open(self._path(name), "rb", buffering=0) as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing that is there when the block ends, and never if it raises.

        What goes to a store is written to a temporary file here first: what is put there is seen when it is whole.
        """
        if self.is_local:
            with open_atomically(Path(self._path(name))) as file:
                yield file
            return
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            _store(self.address).put_file(file.name, self._path(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as file:
            file.write(content)

    def remove(self, name: str) -> None:
        """Remove a file, which need not be there."""
        if self.is_local:
            Path(self._path(name)).unlink(missing_ok=True)
        elif self.exists(name):
            _store(self.address).rm_file(self._path(name))

    def move_to(self, path: Path) -> None:
        """Move all files to an empty folder of this file system, or copy them where that is not possible."""
        if not self.is_local:
            _store(self.address).get(self.address + "/", str(path), recursive=True)
            return
        try:
            os.rename(self.address, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copytree(self.address, path, dirs_exist_ok=True)

    def here(self, name: str) -> Path:
        """Return the path of a file, or of a copy of it that stays as long as this process."""
        return Path(self._path(name)) if self.is_local else _copied(self, name)

    def save(self, name: str, **arrays: np.ndarray) -> None:
        """Write arrays to a file, ``.npz``."""
        with self.writing(name) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def load(self, name: str, *names: str) -> Mapping[str, Any]:
        """Return arrays that `save` wrote: those of some names, or all."""
        with np.load(self._path(name) if self.is_local else io.BytesIO(self.read(name))) as arrays:
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


def _store(address: str) -> Any:
    return store_of(address)[0]


@functools.cache
def _copied(folder: Folder, name: str) -> Path:
    path = Path(tempfile.mkdtemp(dir=_temporary().name)) / Path(name).name
    path.write_bytes(folder.read(name))
    return path


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="alma-prep-text-")
