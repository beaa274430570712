"""Token files in fairseq's memory-mapped format: ``NAME.bin`` holds the ids, ``NAME.idx`` where each sequence begins.

Written with NumPy, piece by piece, so that preparing text needs neither fairseq nor torch and no memory to speak of.
Layout as fairseq's ``MMapIndexedDataset``.
"""

import struct
from pathlib import Path
from typing import Iterator, Union

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
_POINTERS_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 1 << 14  # of ids that a file is opened for: it is one of thousands


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the type that fairseq chooses for a dictionary of ``vocab_size`` tokens and its own four symbols."""
    return np.dtype("uint16") if vocab_size + NUM_FAIRSEQ_SYMBOLS < 65500 else np.dtype("uint32")


class TokenFileWriter:
    """Write one token file; the files stay closed between two calls, so that any number of them can be in work.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``; its folder exists.
        dtype: type of an id, ``uint16`` or ``uint32``.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self._bin = Path(f"{prefix}.bin")
        self._idx = Path(f"{prefix}.idx")
        self._dtype = dtype
        self._pending = bytearray()
        self._sizes = bytearray()
        self.num_tokens = 0
        self.num_documents = 0
        self._bin.write_bytes(b"")

    def append(self, ids: bytes, sizes: np.ndarray) -> None:
        """Append sequences.

        Args:
            ids: the ids of all sequences one after the other, each sequence with its eos, as bytes of ``dtype``.
            sizes: ``(num_sequences,)``, int32: ids per sequence.
        """
        self._pending += ids
        if len(self._pending) >= _BYTES_AT_ONCE:
            self._flush()
        self._sizes += sizes.astype("<i4").tobytes()
        self.num_tokens += len(ids) // self._dtype.itemsize
        self.num_documents += len(sizes)

    def close(self) -> None:
        """Write what is left and the index."""
        self._flush()
        code = next(code for code, dtype in _DTYPE_CODES.items() if dtype == self._dtype)
        with naming(self._idx), open(self._idx, "wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, self.num_documents))
            file.write(self._sizes)
            for pointers in self._pointers():
                file.write(pointers.astype("<i8").tobytes())

    def _flush(self) -> None:
        with naming(self._bin), open(self._bin, "ab") as file:
            file.write(self._pending)
        self._pending = bytearray()

    def _pointers(self) -> Iterator[np.ndarray]:
        """Yield the byte offset of each sequence, a piece at a time."""
        offset = 0
        sizes = np.frombuffer(self._sizes, "<i4")
        for start in range(0, len(sizes), _POINTERS_AT_ONCE):
            ends = np.cumsum(sizes[start : start + _POINTERS_AT_ONCE], dtype=np.int64) * self._dtype.itemsize
            yield np.concatenate([np.zeros(1, np.int64), ends[:-1]]) + offset
            offset += int(ends[-1])


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
        for start in range(0, len(self.ids), _POINTERS_AT_ONCE):
            ids = self.ids[start : start + _POINTERS_AT_ONCE]
            if not 0 <= ids.min() <= ids.max() < num_ids:
                raise AlmaError(f"{self._bin}: ids {ids.min()} to {ids.max()} found, 0 to {num_ids - 1} is needed")
            counts += np.bincount(ids, minlength=num_ids)
        return counts
