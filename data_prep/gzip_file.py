"""Open a file that may be compressed with gzip, whatever its name says."""

import gzip
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Iterator, cast

from fairseq_alma.errors import AlmaError

_MAGIC = b"\x1f\x8b"


@contextmanager
def open_plain_or_gz(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, through gzip if its content begins so.

    Raises:
        AlmaError: the gzip data are broken; that may show only while they are read.
    """
    with open(path, "rb") as plain:
        magic = plain.read(len(_MAGIC))
        plain.seek(0)
        if magic != _MAGIC:
            yield plain
            return
        try:
            with gzip.GzipFile(fileobj=plain) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise AlmaError(f"{path}: broken gzip data ({error}); fetch the file again") from error
