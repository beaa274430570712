"""Token files in fairseq's memory-mapped format: ``NAME.bin`` holds the ids, ``NAME.idx`` where each sequence begins.

Written with NumPy, piece by piece, so that preparing text needs neither fairseq nor torch and no memory to speak of.
Layout as fairseq's ``MMapIndexedDataset``.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence, Union

import numpy as np

from fairseq_alma.errors import AlmaError, naming

NUM_FAIRSEQ_SYMBOLS = 4  # fairseq's Dictionary begins with <s> <pad> </s> <unk>, so token u has id u + 4
EOS = 2

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES: dict[int, np.dtype] = {
    8: np.dtype("uint16"),
    9: np.dtype("uint32"),
    5: np.dtype("int64"),
    4: np.dtype("int32"),
}
_HEADER = struct.Struct("<9sQBQ")
_ENTRY_SIZE = 4 + 8  # bytes of a sequence in the index: how many ids it has, and where they begin
_IDS_AT_ONCE = 1 << 20


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the type that fairseq chooses for a dictionary of ``vocab_size`` tokens and its own four symbols."""
    return np.dtype("uint16") if vocab_size + NUM_FAIRSEQ_SYMBOLS < 65500 else np.dtype("uint32")


@dataclass(frozen=True)
class TokenFileWriter:
    """Write one token file in parts, in any order and from any number of processes; how large it gets is known.

    Attributes:
        prefix: path of the files without ``.bin`` and ``.idx``.
        dtype: type of an id, ``uint16`` or ``uint32``.
        num_documents: sequences in all.
        num_tokens: ids in all, each sequence with its eos.
    """

    prefix: Path
    dtype: np.dtype
    num_documents: int
    num_tokens: int

    def create(self) -> None:
        """Make the files, full of zeros but for the header of the index, and their folder."""
        code = next(code for code, dtype in _DTYPE_CODES.items() if dtype == self.dtype)
        header = _HEADER.pack(_MAGIC, _VERSION, code, self.num_documents)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        sizes = (self.num_tokens * self.dtype.itemsize, len(header) + self.num_documents * _ENTRY_SIZE)
        for suffix, start, size in zip((".bin", ".idx"), (b"", header), sizes, strict=True):
            path = Path(f"{self.prefix}{suffix}")
            with naming(path), open(path, "wb") as file:
                file.write(start)
                file.truncate(size)

    def write(self, ids: bytes, sizes: np.ndarray, first_document: int, first_token: int) -> None:
        """Write sequences to their place.

        Args:
            ids: the ids of all sequences one after the other, as bytes of ``dtype``.
            sizes: ``(num_sequences,)``: ids per sequence.
            first_document: number of sequences before these.
            first_token: number of ids before these.
        """
        ends = first_token + np.cumsum(sizes, dtype=np.int64)
        pointers = ((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes()
        index = [
            (first_document * 4, sizes.astype("<i4").tobytes()),
            (self.num_documents * 4 + first_document * 8, pointers),
        ]
        _write_at(Path(f"{self.prefix}.bin"), [(first_token * self.dtype.itemsize, ids)])
        _write_at(Path(f"{self.prefix}.idx"), [(_HEADER.size + place, content) for place, content in index])


def _write_at(path: Path, parts: Sequence[tuple[int, bytes]]) -> None:
    with naming(path), open(path, "r+b", buffering=0) as file:
        for place, content in parts:
            left = memoryview(content)
            while left:
                written = os.pwrite(file.fileno(), left, place)
                left, place = left[written:], place + written


class TokenFile:
    """Read one token file in place.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.

    Attributes:
        ids: ``(num_tokens,)`` memory map of all ids.
        sizes: ``(num_sequences,)``, int32: ids per sequence.

    Raises:
        AlmaError: the index is of another format, or the token file is shorter or longer than it says.
    """

    def __init__(self, prefix: Union[str, Path]) -> None:
        idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self._bin = bin_
        with open(idx, "rb") as file:
            header = file.read(_HEADER.size)
        magic, version, code, num_sequences = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if (magic, version) != (_MAGIC, _VERSION) or code not in _DTYPE_CODES:
            raise AlmaError(f"{idx}: not an index of fairseq's mmap format; prepare the stream again")
        dtype = _DTYPE_CODES[code]
        size = _HEADER.size + num_sequences * _ENTRY_SIZE
        if idx.stat().st_size != size:
            raise AlmaError(f"{idx}: {idx.stat().st_size} bytes found, {size} needed; prepare the stream again")
        self.sizes = np.fromfile(idx, dtype="<i4", count=num_sequences, offset=_HEADER.size)
        if num_sequences and self.sizes.min() < 0:
            raise AlmaError(f"{idx}: a sequence of {self.sizes.min()} ids; prepare the stream again")
        needed = int(self.sizes.sum(dtype=np.int64)) * dtype.itemsize
        found = bin_.stat().st_size
        if found != needed:
            raise AlmaError(f"{bin_}: {found} bytes found, its index needs {needed}; prepare the stream again")
        self.ids = np.memmap(bin_, dtype=dtype, mode="r") if needed else np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def count_ids(self, num_ids: int) -> np.ndarray:
        """Return how often each id from 0 to ``num_ids - 1`` occurs, ``(num_ids,)``."""
        counts = np.zeros(num_ids, dtype=np.int64)
        for start in range(0, len(self.ids), _IDS_AT_ONCE):
            ids = self.ids[start : start + _IDS_AT_ONCE]
            if not 0 <= ids.min() <= ids.max() < num_ids:
                raise AlmaError(f"{self._bin}: ids {ids.min()} to {ids.max()} found, 0 to {num_ids - 1} is needed")
            counts += np.bincount(ids, minlength=num_ids)
        return counts
