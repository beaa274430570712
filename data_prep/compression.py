"""Open plain and compressed files alike, and report clearly when one is broken.

The kind follows from the file's first bytes, so that standard input and misnamed files work too. Every form that the
tool itself unpacks is read: several members, empty and skippable frames, padding. Ours rather than xopen or fsspec:
both read bzip2 and xz through the standard library's file classes, which end silently where the second of several
streams in a file is damaged (half of a corpus, then), and neither limits the memory that a file may ask for.
"""

import bz2
import gzip
import io
import lzma
from pathlib import Path
from typing import Any, BinaryIO, Callable, Optional, Protocol

from fairseq_alma.errors import AlmaError

_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    **{bytes([low]) + b"\x2a\x4d\x18": "zstandard" for low in range(0x50, 0x60)},  # a skippable frame, as of pzstd
}
_READ_SIZE = 1 << 17
_ZSTANDARD_READ_SIZE = 1 << 12  # its frames unpack to 30,000 times their size at most, all at once
_ZSTANDARD_WINDOW = 1 << 31  # bytes: zstd --long=31, of which only what a frame fills is taken
_XZ_MEMORY = 1 << 29  # bytes; xz -9 needs 65 MiB
_LARGEST_CONTENT = 1 << 30  # bytes of published data


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
        label: its name in messages.

    Raises:
        AlmaError: the name promises compressed data but the content is something else, or zstandard is not installed.
    """

    def __init__(self, path: Path, label: str) -> None:
        self._label = label
        self._raw = open(path, "rb")  # noqa: SIM115  closed by __exit__
        self._kind = self._detect(path)
        self._file = self._open()
        self._num_bytes = 0

    def __enter__(self) -> "DecompressedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    @property
    def position(self) -> int:
        """Bytes of the file itself, still compressed, that have been read so far."""
        return self._raw.tell()

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed."""
        return self._kind is not None

    def skip(self, num_bytes: int) -> None:
        """Skip the first bytes of a file that is not compressed."""
        assert not num_bytes or self._kind is None
        self._raw.seek(num_bytes)

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, fewer only at the end.

        Raises:
            AlmaError: the compressed data is broken or cut off.
        """
        try:
            content = self._file.read(size)
        except Exception as error:  # each format has errors of its own
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise AlmaError(
                f"{self._label}: broken {self._kind} data after {self._num_bytes:,} bytes of content ({error}); "
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
            return io.BufferedReader(_Members(self._raw, bz2.BZ2Decompressor), _READ_SIZE)
        if self._kind == "xz":
            new = lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY)  # noqa: E731
            return io.BufferedReader(_Members(self._raw, new), _READ_SIZE)
        if self._kind == "zstandard":
            try:
                import zstandard
            except ImportError as error:
                raise AlmaError(
                    f"{self._label}: zstandard data, which the package zstandard reads; pip install zstandard"
                ) from error
            return io.BufferedReader(_Members(self._raw, lambda: _ZstandardFrame(zstandard)), _READ_SIZE)
        return self._raw


class _Members(io.RawIOBase):
    """The content of compressed streams, one after the other; NUL bytes between them and at the end are padding.

    Args:
        raw: the file.
        new: makes what decompresses one stream, such as ``bz2.BZ2Decompressor``.
    """

    def __init__(self, raw: BinaryIO, new: Callable[[], Any]) -> None:
        self._raw = raw
        self._new = new
        self._stream: Any = None
        self._rest = b""  # of what was read
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if self._stream is not None and self._stream.eof:
                self._rest, self._stream = self._stream.unused_data, None
            if self._stream is None:
                if not self._next_stream():
                    return 0
            elif self._stream.needs_input and not self._fill():
                raise EOFError("the file ends within a stream")
            piece, self._rest = self._rest, b""
            self._ready = memoryview(self._stream.decompress(piece, _READ_SIZE))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _next_stream(self) -> bool:
        """Begin the next stream; False at the end of the file."""
        while not self._rest.lstrip(b"\0"):
            if not self._fill():
                return False
        self._rest = self._rest.lstrip(b"\0")
        self._stream = self._new()
        return True

    def _fill(self) -> bool:
        self._rest = self._raw.read(_READ_SIZE)
        return bool(self._rest)


class _ZstandardFrame:
    """One zstandard frame, with the methods of the standard library's decompressors."""

    def __init__(self, zstandard: Any) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTANDARD_WINDOW).decompressobj()
        self._rest = b""

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data + self._rest

    def decompress(self, piece: bytes, most: int) -> bytes:
        """Take in a piece and return content, ``most`` bytes of it or somewhat more."""
        self._rest += piece
        parts, size = [], 0
        while self._rest and size < most and not self._frame.eof:
            piece, self._rest = self._rest[:_ZSTANDARD_READ_SIZE], self._rest[_ZSTANDARD_READ_SIZE:]
            parts.append(self._frame.decompress(piece))
            size += len(parts[-1])
        return b"".join(parts)


def read_whole(path: Path, limit: int = _LARGEST_CONTENT) -> bytes:
    """Return the content of a file of published data, unpacked. Raises AlmaError if it is broken or above the limit."""
    content = bytearray()
    with DecompressedFile(path, str(path)) as file:
        while len(content) <= limit and (piece := file.read(1 << 20)):
            content += piece
    if len(content) > limit:
        raise AlmaError(f"{path}: more than {limit >> 20} MiB found, it is no such file; fetch the file again")
    return bytes(content)
