"""Read plain and compressed files through one interface, and report damaged files in one line.

The first bytes of a file determine its kind, so that standard input and misnamed files work too. Several members, empty
and skippable frames, and padding are read as the command-line tools read them. xopen and fsspec read bzip2 and xz
through the standard library's file classes, which end silently at a second member that is damaged; neither library
limits the memory that a file may need.
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
    **{bytes([low]) + b"\x2a\x4d\x18": "zstandard" for low in range(0x50, 0x60)},  # pzstd writes skippable frames
}
_READ_SIZE = 1 << 17
_ZSTANDARD_READ_SIZE = 1 << 12  # A frame is decompressed at once; its content has at most 30,000 times its size.
_ZSTANDARD_WINDOW = 1 << 31  # bytes, the window of zstd --long=31; a frame allocates only the memory that it needs
_XZ_MEMORY = 1 << 29  # bytes; decompressing the output of xz -9 needs 65 MiB
_LARGEST_CONTENT = 1 << 30  # bytes; larger than every published file


def strip_compression_suffix(name: str) -> str:
    """Return a file name without its compression suffix, such as ``.gz``."""
    path = Path(name)
    return path.stem if path.suffix in _SUFFIXES else path.name


class DecompressedFile:
    """The decompressed content of a file.

    Args:
        path: the file.
        label: name of the file in messages.

    Attributes:
        is_packed: whether the file is compressed.

    Raises:
        AlmaError: the name has a compression suffix, but the content has another format.
    """

    def __init__(self, path: Path, label: str) -> None:
        self._label = label
        self._raw = open(path, "rb")  # noqa: SIM115  __exit__ closes it
        start = self._raw.read(6)
        self._raw.seek(0)
        self._kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")
        self.is_packed = bool(self._kind)
        if path.suffix in _SUFFIXES and not self.is_packed:
            found = f"its content begins with {start!r}" if start else "the file is empty"
            raise AlmaError(f"{label}: {found}, {_SUFFIXES[path.suffix]} data is needed; download the file again")
        self._pieces = _decompressed(self._raw, self._kind, label)
        self._ready = bytearray()
        self._num_bytes = 0

    def __enter__(self) -> "DecompressedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    @property
    def position(self) -> int:
        """Number of bytes read from the file, before decompression."""
        return self._raw.tell()

    def skip(self, num_bytes: int) -> None:
        """Skip the first bytes of a file that is not compressed."""
        self._raw.seek(num_bytes)

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, fewer only at the end.

        Raises:
            AlmaError: the compressed data is broken or truncated, or zstandard is not installed.
        """
        if not self.is_packed:
            return self._raw.read(size)
        try:
            while len(self._ready) < size and (piece := next(self._pieces, None)) is not None:
                self._ready += piece
        except Exception as error:  # Each format raises errors of other types.
            if isinstance(error, (MemoryError, AlmaError)) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise AlmaError(
                f"{self._label}: broken {self._kind} data after {self._num_bytes:,} bytes of content ({error}); "
                "download or compress the file again"
            ) from error
        content = bytes(self._ready[:size])
        del self._ready[:size]
        self._num_bytes += len(content)
        return content


def _decompressed(raw: BinaryIO, kind: str, label: str) -> Iterator[bytes]:
    """Yield the content of all members or frames; NUL bytes between them and at the end are padding."""
    if kind == "gzip":
        yield from iter(functools.partial(gzip.GzipFile(fileobj=raw).read, _READ_SIZE), b"")
        return
    read_size, limit = _READ_SIZE, [_READ_SIZE]
    new: Callable[[], Any] = bz2.BZ2Decompressor
    if kind == "xz":
        new = functools.partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
    elif kind == "zstandard":
        try:
            import zstandard
        except ImportError as error:
            raise AlmaError(f"{label}: zstandard data, which needs zstandard; pip install zstandard") from error
        new = zstandard.ZstdDecompressor(max_window_size=_ZSTANDARD_WINDOW).decompressobj
        read_size, limit = _ZSTANDARD_READ_SIZE, []
    rest = b""
    while True:
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := raw.read(read_size)):
                return
        member = new()
        while not member.eof:
            if not rest and getattr(member, "needs_input", True) and not (rest := raw.read(read_size)):
                raise EOFError("unexpected end of file")
            yield member.decompress(rest, *limit)
            rest = b""
        rest = member.unused_data


def read_file(path: Path, limit: int = _LARGEST_CONTENT) -> bytes:
    """Return the decompressed content of a file. Raises AlmaError if it is broken or larger than ``limit`` bytes."""
    with DecompressedFile(path, str(path)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise AlmaError(f"{path}: more than {limit >> 20} MiB of content found, too large; download the file again")
    return content
