"""Say which file a fault of the disk concerns: Python names it when opening fails, but not when writing does."""

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
