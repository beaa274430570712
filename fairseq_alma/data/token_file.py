"""Token files in fairseq's memory-mapped format: ``NAME.bin`` holds the ids, ``NAME.idx`` where each sequence begins.

Written with NumPy, piece by piece, so that preparing text needs neither fairseq nor torch and no memory to speak of.
Layout as fairseq's ``MMapIndexedDataset``.
"""

import hashlib
import struct
from array import array
from pathlib import Path
from typing import IO, Union

import numpy as np

from fairseq_alma.errors import AlmaError

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
_IDS_AT_ONCE = _SIZES_AT_ONCE = 1 << 20


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the type that fairseq chooses for a dictionary of ``vocab_size`` tokens and its own four symbols."""
    return np.dtype("uint16") if vocab_size + NUM_FAIRSEQ_SYMBOLS < 65500 else np.dtype("uint32")


class TokenFileWriter:
    """Write one token file, part by part; the index once all sequences are known, four bytes of each.

    Args:
        tokens: the ``.bin`` file, empty.
        index: the ``.idx`` file, empty.
        dtype: type of an id, ``uint16`` or ``uint32``.
    """

    def __init__(self, tokens: IO[bytes], index: IO[bytes], dtype: np.dtype) -> None:
        self._tokens, self._index = _Digested(tokens), _Digested(index)
        self._dtype = dtype
        self._sizes = array("i")

    def write(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        """Write sequences.

        Args:
            ids: the ids of all of them one after the other.
            sizes: ``(num_sequences,)``, int32: ids per sequence.
        """
        self._tokens.write(ids.tobytes())
        self._sizes.frombytes(sizes.astype("=i4").tobytes())

    def close(self) -> list[tuple[int, str]]:
        """Write the index; return size and sha256 of both files."""
        code = next(code for code, dtype in _DTYPE_CODES.items() if dtype == self._dtype)
        self._index.write(_HEADER.pack(_MAGIC, _VERSION, code, len(self._sizes)))
        sizes = np.frombuffer(self._sizes, "=i4") if self._sizes else np.empty(0, np.int32)
        self._index.write(sizes.astype("<i4").tobytes())
        end = 0
        for first in range(0, len(sizes), _SIZES_AT_ONCE):
            part = sizes[first : first + _SIZES_AT_ONCE]
            ends = end + np.cumsum(part, dtype=np.int64) * self._dtype.itemsize
            self._index.write((ends - part.astype(np.int64) * self._dtype.itemsize).astype("<i8").tobytes())
            end = int(ends[-1])
        return [(file.size, file.sha256) for file in (self._tokens, self._index)]


class _Digested:
    """A file that is written, with the size and the sha256 of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


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
