"""Open plain and compressed files alike, and report clearly when one is broken.

The kind follows from the file's first bytes, so that standard input and misnamed files work too. Every form that the
tool itself unpacks is read: several members, empty and skippable frames, padding. Ours rather than xopen or fsspec:
both read bzip2 and xz through the standard library's file classes, which end silently where the second of several
streams in a file is damaged (half of a corpus, then), and neither limits the memory that a file may ask for.
"""

import bz2
import functools
import gzip
import lzma
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

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
        start = self._raw.read(6)
        self._raw.seek(0)
        self._kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
        promised = _SUFFIXES.get(path.suffix)
        if promised is not None and self._kind is None:
            found = f"its content begins with {start!r}" if start else "the file is empty"
            raise AlmaError(f"{label}: not {promised} data as its name says, {found}; fetch the file again")
        self._pieces = self._unpacked() if self._kind else iter(())
        self._ready = bytearray()
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
        self._raw.seek(num_bytes)

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, fewer only at the end.

        Raises:
            AlmaError: the compressed data is broken or cut off.
        """
        if self._kind is None:
            return self._raw.read(size)
        try:
            while len(self._ready) < size and (piece := next(self._pieces, None)) is not None:
                self._ready += piece
        except Exception as error:  # each format has errors of its own
            if isinstance(error, (MemoryError, AlmaError)) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise AlmaError(
                f"{self._label}: broken {self._kind} data after {self._num_bytes:,} bytes of content ({error}); "
                "fetch or compress the file again"
            ) from error
        content = bytes(self._ready[:size])
        del self._ready[:size]
        self._num_bytes += len(content)
        return content

    def _unpacked(self) -> Iterator[bytes]:
        if self._kind == "gzip":
            return iter(functools.partial(gzip.GzipFile(fileobj=self._raw).read, _READ_SIZE), b"")
        if self._kind == "bzip2":
            return _streams(self._raw, bz2.BZ2Decompressor, _READ_SIZE, (_READ_SIZE,))
        if self._kind == "xz":
            return _streams(self._raw, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY), _READ_SIZE, (_READ_SIZE,))
        try:
            import zstandard
        except ImportError as error:
            raise AlmaError(
                f"{self._label}: zstandard data, which the package zstandard reads; pip install zstandard"
            ) from error
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTANDARD_WINDOW).decompressobj
        return _streams(self._raw, frame, _ZSTANDARD_READ_SIZE, ())


def _streams(raw: BinaryIO, new: Callable[[], Any], read_size: int, limit: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the content of compressed streams, one after the other; NUL bytes between them and at the end are padding.

    Args:
        raw: the file.
        new: makes what decompresses one stream, such as ``bz2.BZ2Decompressor``.
        read_size: bytes of the file that are read at once.
        limit: further arguments of its ``decompress``: the bytes to return at most.
    """
    rest = b""
    while True:
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := raw.read(read_size)):
                return
        stream = new()
        while not stream.eof:
            if not rest and getattr(stream, "needs_input", True) and not (rest := raw.read(read_size)):
                raise EOFError("the file ends within a stream")
            yield stream.decompress(rest, *limit)
            rest = b""
        rest = stream.unused_data


def read_file(path: Path, limit: int = _LARGEST_CONTENT) -> bytes:
    """Return the content of a file of published data, unpacked. Raises AlmaError if it is broken or above the limit."""
    content = bytearray()
    with DecompressedFile(path, str(path)) as file:
        while len(content) <= limit and (piece := file.read(1 << 20)):
            content += piece
    if len(content) > limit:
        raise AlmaError(f"{path}: more than {limit >> 20} MiB found, it is no such file; fetch the file again")
    return bytes(content)
