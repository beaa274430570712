"""Read plain and compressed files through one interface, and raise AlmaError for damaged data.

The first bytes of a file determine the format, so standard input and files without a suffix can be compressed too.
Like gzip, bzip2, xz and zstd, `DecompressedFile` reads files with several members, and skips padding, empty frames and
skippable frames. xopen and fsspec have two disadvantages: they stop at a damaged second member of bzip2 or xz data
without an error, and they do not limit the memory of decompression.
"""

import bz2
import functools
import gzip
import lzma
import re
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

from fairseq_alma.errors import AlmaError

COMPRESSION_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_MAGIC = {
    rb"\x1f\x8b": "gzip",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "bzip2",  # text may begin with BZh
    rb"\xfd7zXZ\x00": "xz",
    rb"\x28\xb5\x2f\xfd": "zstandard",
    rb"[\x50-\x5f]\x2a\x4d\x18": "zstandard",  # pzstd writes skippable frames
}
"""Regular expression for the first bytes of a compressed file -> format."""
_READ_SIZE = 1 << 17
_ZSTANDARD_READ_SIZE = 1 << 12  # zstandard decompresses each input at once, to at most 30,000 times the size.
_ZSTANDARD_WINDOW = 1 << 31  # bytes, the window of zstd --long=31. zstandard allocates less memory for a small frame.
_XZ_MEMORY = 1 << 29  # bytes. Decompressing the output of xz -9 needs 65 MiB.
_LARGEST_CONTENT = 1 << 30  # bytes. Every file of a published data set is smaller.


class DecompressedFile:
    """Reader of the decompressed content of a file.

    Args:
        raw: binary file object, positioned at the start of the file.
        label: name of the file in messages.

    Attributes:
        is_packed: whether the file is compressed.

    Raises:
        AlmaError: the name has a compression suffix, but the content is not compressed.
    """

    def __init__(self, raw: BinaryIO, label: str) -> None:
        self._raw, self._label = raw, label
        start, suffix = raw.read(10), Path(raw.name).suffix
        raw.seek(0)
        self._kind = next((kind for magic, kind in _MAGIC.items() if re.match(magic, start)), "")
        self.is_packed = bool(self._kind)
        if suffix in COMPRESSION_SUFFIXES and not self.is_packed:
            expected, found = COMPRESSION_SUFFIXES[suffix], f"data that begins with {start!r}" if start else "no data"
            raise AlmaError(f"{label}: expected {expected} data, found {found}; download the file again")
        self._pieces = _decompressed(raw, self._kind, label)
        self._ready = bytearray()
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, or all remaining bytes if fewer remain.

        Raises:
            AlmaError: the compressed data is broken or truncated, or zstandard is not installed.
        """
        if not self.is_packed:
            return self._raw.read(size)
        try:
            while len(self._ready) < size and (piece := next(self._pieces, None)) is not None:
                self._ready += piece
        except Exception as error:  # Each format raises errors of different types.
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
    """Yield the decompressed content of all members or frames. Skip padding (NUL bytes between or after members)."""
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
            raise AlmaError(f"{label}: zstandard is not installed; run pip install zstandard") from error
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


def read_file(path: Path) -> bytes:
    """Return the decompressed content of a file. Raises AlmaError if the data is damaged or too large."""
    with open(path, "rb") as raw:
        content = DecompressedFile(raw, str(path)).read(_LARGEST_CONTENT + 1)
    if len(content) > _LARGEST_CONTENT:
        raise AlmaError(f"{path}: expected at most {_LARGEST_CONTENT >> 20} MiB of content; download the file again")
    return content
