"""Open plain and compressed files alike, and say clearly when one is broken.

The kind is told by the file's first bytes, so that standard input and misnamed files work too.
"""

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import BinaryIO, Optional, Protocol

from fairseq_alma.errors import AlmaError

_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
_READ_SIZE = 1 << 17


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def strip_compression_suffix(name: str) -> str:
    """Return a file's name without ``.gz`` and its like."""
    path = Path(name)
    return path.stem if path.suffix in _SUFFIXES else path.name


class DecompressedFile:
    """A file's content as bytes, whatever it is compressed with.

    Args:
        path: the file.
        label: how messages call it.

    Raises:
        AlmaError: the name says compressed but the content is something else, or zstandard is not installed.
    """

    def __init__(self, path: Path, label: str) -> None:
        self._label = label
        self._raw = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._kind = self._detect(path)
        self._file = self._open()
        self._num_bytes = 0

    def __enter__(self) -> "DecompressedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    @property
    def position(self) -> int:
        """Bytes of the file itself, compressed as it is, that have been read so far."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, fewer only at the end.

        Raises:
            AlmaError: the compressed data is broken or cut off.
        """
        try:
            content = self._file.read(size)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise AlmaError(
                f"{self._label}: broken {self._kind} data after {self._num_bytes:,} bytes of text ({error}); "
                "fetch or compress the file again"
            ) from error
        self._num_bytes += len(content)
        return content

    def _detect(self, path: Path) -> Optional[str]:
        start = self._raw.read(6)
        self._raw.seek(0)
        kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
        promised = _SUFFIXES.get(path.suffix)
        if promised is not None and kind is None:
            found = f"its content begins with {start!r}" if start else "the file is empty"
            raise AlmaError(f"{self._label}: not {promised} data as its name says, {found}; fetch the file again")
        return kind

    def _open(self) -> _Readable:
        if self._kind == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        if self._kind == "bzip2":
            return bz2.BZ2File(self._raw)
        if self._kind == "xz":
            return lzma.LZMAFile(self._raw)
        if self._kind == "zstandard":
            return io.BufferedReader(_ZstandardReader(self._raw, self._label))
        return self._raw


class _ZstandardReader(io.RawIOBase):
    """Zstandard frames, one after the other; unlike the package's own reader it notices a frame that is cut off."""

    def __init__(self, raw: BinaryIO, label: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise AlmaError(
                f"{label}: zstandard data, which the package zstandard reads; pip install zstandard"
            ) from error
        self._zstandard = zstandard
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._in_frame = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            chunk = self._raw.read(_READ_SIZE)
            if not chunk:
                if self._in_frame:
                    raise EOFError("the file ends within a frame")
                return 0
            self._ready = self._decompress(chunk)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self, chunk: bytes) -> bytes:
        parts = []
        while chunk:
            try:
                parts.append(self._frame.decompress(chunk))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            self._in_frame = not self._frame.eof
            chunk = self._frame.unused_data
            if self._frame.eof:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        return b"".join(parts)
