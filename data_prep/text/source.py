"""The inputs of a command: files, folders and standard input, cut into blocks."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional, Sequence

from data_prep.text.compression import DecompressedFile, strip_compression_suffix
from data_prep.text.document import Block
from fairseq_alma.errors import AlmaError, naming

STANDARD_INPUT = "-"
SPOOLED = "standard-input"  # name of the file that stands for it
BLOCK_SIZE = 1 << 20
MAX_DOCUMENT_SIZE = 1 << 28

_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class Source:
    """One file of input.

    Attributes:
        path: where it is read.
        label: how messages call it.
        argument: number of the command's argument that named it or its folder, from 0.
        form: how documents stand in it (see `Block`).
        field: where the text is in a record.
    """

    path: Path
    label: str
    argument: int
    form: str
    field: str

    @property
    def size(self) -> int:
        """Size of the file in bytes, compressed as it is."""
        return self.path.stat().st_size

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks, each with the number of bytes of the file that have been read with it.

        Raises:
            AlmaError: the file is broken, or a document is too long.
        """
        yield from _parquet_blocks(self) if self.form == "parquet" else _byte_blocks(self)


def spool_standard_input(path: Path) -> None:
    """Copy standard input to a file, because it must be read more than once."""
    with naming(path), open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, BLOCK_SIZE)


def find_sources(inputs: Sequence[str], form: Optional[str], field: str, spooled: Path) -> list[Source]:
    """Return every file that the inputs mean: folders recursively, in the order of their names.

    Args:
        inputs: files, folders, or ``-``.
        form: how documents stand in all of them; None to go by each file's name.
        field: where the text is in a record.
        spooled: where `spool_standard_input` has put standard input.

    Raises:
        AlmaError: an input does not exist, or a folder holds no file.
    """
    sources = []
    for argument, given in enumerate(inputs):
        if given == STANDARD_INPUT:
            sources.append(Source(spooled, "standard input", argument, form or "text", field))
            continue
        for path in _files_of(Path(given)):
            sources.append(Source(path, str(path), argument, form or _form_of(path), field))
    return sources


def _files_of(given: Path) -> list[Path]:
    if not given.exists():
        raise AlmaError(f"{given}: no such file or folder; give the text to prepare, or - for standard input")
    if not given.is_dir():
        return [given]
    visible = [
        path
        for path in sorted(given.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(given).parts)
    ]
    if not visible:
        raise AlmaError(f"{given}: no file in this folder; give a folder that holds the text")
    return visible


def _form_of(path: Path) -> str:
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    return _FORMS.get(Path(strip_compression_suffix(path.name)).suffix, "text")


def _byte_blocks(source: Source) -> Iterator[tuple[Block, int]]:
    """Cut at the last boundary between documents that each MiB brings."""
    first_line = 1
    pending = bytearray()
    with DecompressedFile(source.path, source.label) as file:
        while chunk := file.read(BLOCK_SIZE):
            searched = max(0, len(pending) - BLOCK_SIZE)  # a blank line may have begun in what came before
            pending += chunk
            end = _last_boundary(pending, source.form, searched)
            if end == 0:
                if len(pending) > MAX_DOCUMENT_SIZE:
                    raise AlmaError(_too_long(source, first_line))
                continue
            content = bytes(pending[:end])
            yield Block(source.label, source.form, source.field, first_line, content), file.position
            first_line += content.count(b"\n")
            del pending[:end]
        if pending:
            yield Block(source.label, source.form, source.field, first_line, bytes(pending)), file.position


def _last_boundary(content: bytearray, form: str, start: int) -> int:
    """Return where the last document that is complete ends, 0 if none is."""
    if form != "text":
        return content.rfind(b"\n", start) + 1
    end = max(content.rfind(b"\n\n", start), content.rfind(b"\n\r\n", start))
    if end >= 0:
        return end + 1
    end = 0
    for match in _BLANK_LINE.finditer(content, start):
        end = match.start() + 1
    return end


def _too_long(source: Source, first_line: int) -> str:
    separator = "an empty line" if source.form == "text" else "a line feed"
    return (
        f"{source.label}, line {first_line}: a document of more than {MAX_DOCUMENT_SIZE >> 20} MiB found; documents "
        f"must be separated by {separator}, or choose another --format"
    )


def _parquet_blocks(source: Source) -> Iterator[tuple[Block, int]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise AlmaError(f"{source.label}: a Parquet file, which pyarrow reads; pip install pyarrow") from error
    try:
        with parquet.ParquetFile(source.path) as file:
            if source.field not in file.schema_arrow.names:
                raise AlmaError(
                    f"{source.label}: no column {source.field!r}, the columns are "
                    f"{', '.join(map(repr, file.schema_arrow.names))}; name the column of the text with --field"
                )
            first_row, num_rows = 1, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[source.field]):
                values = batch.column(0).to_pylist()
                position = source.size * (first_row - 1 + len(values)) // num_rows
                yield Block(source.label, source.form, source.field, first_row, values), position
                first_row += len(values)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise AlmaError(f"{source.label}: broken Parquet data ({error}); fetch the file again") from error
