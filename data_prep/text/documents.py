"""Input files, the pieces of them that any worker can read alone, their blocks, and the documents in these.

A piece is a byte range of a plain file, row groups of a Parquet file, or whole files; a block is about one MiB of it
that begins and ends between two documents. Where pieces and blocks are cut decides nothing about the documents.
"""

import datetime
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional, Sequence, Union

from data_prep.build_folder import recorded_name
from data_prep.compression import DecompressedFile
from fairseq_alma.errors import AlmaError

PERIODS = {"year": 4, "month": 7, "day": 10}
"""Characters of a date that name one: ``2024-05-17``."""
TABLES = {"parquet": "Parquet", "arrow": "Arrow"}
BLOCK_SIZE = 1 << 20
MAX_DOCUMENT_SIZE = 1 << 28
PIECE_SIZE = 1 << 23  # bytes of a file
_EMPTY_LINE = re.compile(r"\n\s*\n")
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_MAX_GROUP_NAME = 100
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """One file of input.

    Attributes:
        path: where it is read.
        label: its name in messages.
        argument: number of the command's argument that named it or its folder, from 0.
        form: ``text`` (documents separated by an empty line), ``lines``, ``jsonl``, ``parquet`` or ``arrow``.
        field: field or column that holds the text.
        is_copy: it is the copy of standard input or of a pipe.
        by: field or column that names a document's group (``--by``).
        period: one of `PERIODS`: the group is that part of a date; None: the whole value.
    """

    path: Path
    label: str
    argument: int
    form: str
    field: str
    is_copy: bool = False
    by: Optional[str] = None
    period: Optional[str] = None

    @property
    def name(self) -> str:
        """The name that the manifest records."""
        return "-" if self.is_copy else recorded_name(self.path)

    @property
    def stamp(self) -> tuple[int, int]:
        """Size in bytes, compressed or not, and time of the last change: other ones mean another content."""
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Block:
    """A part of one input that begins and ends between two documents.

    Attributes:
        source: the input.
        content: the bytes; of a table the rows, ``(text,)`` or ``(text, group)``.
        first_line: number of the first line (of a table: row) in the input, from 1.
        start: the byte of the file that ``first_line`` is counted from; its line is found when a message needs it.
    """

    source: Source
    content: Union[bytes, Sequence[tuple]]
    first_line: int = 1
    start: int = 0

    def where(self, number: int) -> str:
        """Return what messages call the line or row ``number`` lines after the first one."""
        if self.source.form in TABLES:
            return f"{self.source.label}, row {self.first_line + number}"
        lines, left = self.first_line + number, self.start
        with open(self.source.path, "rb") as file:
            while left > 0 and (content := file.read(min(left, BLOCK_SIZE))):
                lines += content.count(b"\n")
                left -= len(content)
        return f"{self.source.label}, line {lines}"


def documents_of(block: Block) -> list[str]:
    """Return the documents of a block without white space around them; an empty one is no document.

    Raises:
        AlmaError: the block is no UTF-8 text, or a record lacks the field.
    """
    if block.source.form in ("text", "lines"):
        text = text_of(block)
        texts: Iterable[str] = _EMPTY_LINE.split(text) if block.source.form == "text" else text.split("\n")
    else:
        texts = (_checked_text(block, number, text) for number, text, _ in _records(block))
    return [stripped for each in texts if (stripped := each.strip())]


def documents_and_groups_of(block: Block) -> list[tuple[str, str]]:
    """Return the documents of a block of records, each with its group. Raises AlmaError as `documents_of` does."""
    return [
        (stripped, _group_name(block, number, group))
        for number, text, group in _records(block)
        if (stripped := _checked_text(block, number, text).strip())
    ]


def text_of(block: Block) -> str:
    """Return a block of bytes as text with plain line feeds. Raises AlmaError if it is no UTF-8 text."""
    content = block.content
    assert isinstance(content, bytes)
    remedy = "the input must be text in UTF-8: convert it (iconv), or leave this file out"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        where = block.where(content.count(b"\n", 0, error.start))
        raise AlmaError(f"{where}: byte 0x{content[error.start]:02x} is not UTF-8; {remedy}") from error
    null = text.find("\0")
    if null >= 0:
        raise AlmaError(f"{block.where(text.count(chr(10), 0, null))}: binary data (a NUL byte) found; {remedy}")
    if block.first_line == 1 and block.start == 0:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n") if "\r" in text else text


def _records(block: Block) -> Iterator[tuple[int, object, object]]:
    """Yield the number of lines or rows before a record, its text, and the value that names its group."""
    field, by = block.source.field, block.source.by
    if block.source.form in TABLES:
        assert not isinstance(block.content, bytes)
        for number, row in enumerate(block.content):
            yield number, row[0], row[-1]
        return
    for number, line in enumerate(text_of(block).split("\n")):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise AlmaError(
                f"{block.where(number)}: not JSON ({error}); each line must be one JSON object, or choose another "
                "--format"
            ) from error
        if not isinstance(record, dict):
            raise AlmaError(
                f"{block.where(number)}: a JSON {type(record).__name__} found; each line must be one JSON object"
            )
        for name, what in ((field, "text with --field"), (by, "group with --by")):
            if name is not None and name not in record:
                fields = ", ".join(map(repr, record)) or "none"
                raise AlmaError(
                    f"{block.where(number)}: no field {name!r}, the fields are {fields}; name the field of the {what}"
                )
        yield number, record[field], record[by] if by is not None else None


def _checked_text(block: Block, number: int, text: object) -> str:
    field = block.source.field
    if not isinstance(text, str):
        raise AlmaError(
            f"{block.where(number)}: {field!r} is {text!r:.40}, it must be a text; correct the record or give another "
            "--field"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AlmaError(
            f"{block.where(number)}: {field!r} holds half a surrogate pair, which is no text; correct the record"
        ) from error
    return text


def _group_name(block: Block, number: int, value: object) -> str:
    period = block.source.period
    name = value.isoformat() if isinstance(value, datetime.date) else value
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_GROUP_NAME:
        if period is None:
            return name
        length = PERIODS[period]
        if len(name) >= length and _DATE.fullmatch(name[:length]):
            return name[:length]
    needed = "a word or a whole number" if period is None else f"a date with its {period} (2024-05-17)"
    raise AlmaError(
        f"{block.where(number)}: {block.source.by!r} is {value!r:.40}, {needed} is needed; correct the record or --by"
    )


@dataclass(frozen=True)
class FilePart:
    """A file, or the documents that begin in a range of it: of bytes, or of the row groups of a Parquet file.

    Attributes:
        source: the file.
        start: first byte or row group.
        end: the one after the last; None: the end of the file.
    """

    source: Source
    start: int = 0
    end: Optional[int] = None

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks, each with the number of bytes of the file that were read for it.

        Raises:
            AlmaError: the file is broken, or a document is too long.
        """
        return _table_blocks(self) if self.source.form in TABLES else _byte_blocks(self)


Piece = tuple[FilePart, ...]
"""A part of one large file, or several small files, that one task reads one after the other."""


def blocks_of(parts: Iterable[FilePart]) -> Iterator[tuple[Block, int]]:
    """Yield the blocks of several parts, see `FilePart.blocks`."""
    for part in parts:
        yield from part.blocks()


def cut_into_pieces(sources: Sequence[Source]) -> list[Piece]:
    """Cut files into pieces, by nothing but their sizes and forms."""
    pieces: list[Piece] = []
    small: list[FilePart] = []
    waiting = 0
    for source in sources:
        parts = _parts_of(source)
        size = source.stamp[0]
        if len(parts) > 1 or size >= PIECE_SIZE or waiting + size > PIECE_SIZE:
            pieces += [tuple(small)] if small else []
            small, waiting = [], 0
        if len(parts) > 1:
            pieces += [(part,) for part in parts]
        else:
            small, waiting = [*small, *parts], waiting + size
    return [*pieces, tuple(small)] if small else pieces


def _parts_of(source: Source) -> list[FilePart]:
    size = source.stamp[0]
    if size <= PIECE_SIZE or source.form == "arrow":
        return [FilePart(source)]
    if source.form == "parquet":
        with reading_table(source) as pyarrow, pyarrow.parquet.ParquetFile(source.path) as file:
            number = file.metadata.num_row_groups
        together = max(1, number * PIECE_SIZE // size)
    else:
        with DecompressedFile(source.path, source.label) as opened:
            number, together = (1, 1) if opened.is_packed else (size, PIECE_SIZE)
    starts = range(0, max(number, 1), together)
    return [FilePart(source, start, start + together if start + together < number else None) for start in starts]


def _byte_blocks(part: FilePart) -> Iterator[tuple[Block, int]]:
    """Cut at the last boundary between documents that each MiB brings; a part ends at the first one after its range.

    The next part begins there too: both look for the first boundary at or after the same byte.
    """
    source, end, form = part.source, part.end, part.source.form
    first_line, at, begin = 1, part.start, part.start  # of what is pending
    pending = bytearray()
    with DecompressedFile(source.path, source.label) as file:
        file.skip(part.start)
        is_begun, is_ended, done = part.start == 0, False, part.start
        while not is_ended:
            chunk = file.read(BLOCK_SIZE)
            searched = max(0, len(pending) - BLOCK_SIZE)  # a blank line may have begun in what came before
            pending += chunk
            if not is_begun:
                skipped = _first_boundary(pending, form, 0)
                if skipped == 0 and chunk and len(pending) <= MAX_DOCUMENT_SIZE:
                    continue
                at += skipped
                if skipped == 0 or (end is not None and at > end):
                    return  # no document begins here
                del pending[:skipped]
                is_begun, begin, searched = True, at, 0
            cut = 0
            if end is not None and at + len(pending) > end:
                cut = _first_boundary(pending, form, max(0, end - at))
                is_ended = cut > 0
            if not chunk:
                cut, is_ended = len(pending), True
            cut = cut or _last_boundary(pending, form, searched)
            if cut == 0:
                if len(pending) > MAX_DOCUMENT_SIZE:
                    separator = "an empty line" if form == "text" else "a line feed"
                    raise AlmaError(
                        f"{Block(source, b'', first_line, begin).where(0)}: a document of more than "
                        f"{MAX_DOCUMENT_SIZE >> 20} MiB found; documents must be separated by {separator}, or choose "
                        "another --format"
                    )
                continue
            content = bytes(pending[:cut])
            yield Block(source, content, first_line, begin), file.position - done
            done = file.position
            first_line += content.count(b"\n")
            del pending[:cut]
            at += cut


def _first_boundary(content: bytearray, form: str, start: int) -> int:
    """Return where the first document ends whose end is at ``start`` or later, 0 if none does."""
    if form != "text":
        return content.find(b"\n", start) + 1
    match = _BLANK_LINE.search(content, start)
    return match.start() + 1 if match else 0


def _last_boundary(content: bytearray, form: str, start: int) -> int:
    """Return where the last complete document ends, 0 if none is complete."""
    if form != "text":
        return content.rfind(b"\n", start) + 1
    end = max(content.rfind(b"\n\n", start), content.rfind(b"\n\r\n", start))
    if end >= 0:
        return end + 1
    return max((match.start() + 1 for match in _BLANK_LINE.finditer(content, start)), default=0)


@contextmanager
def reading_table(source: Source) -> Iterator[Any]:
    """Yield pyarrow; raise AlmaError for whatever it finds wrong with a table, or where it is not installed."""
    kind = TABLES[source.form]
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise AlmaError(f"{source.label}: {kind} data, which pyarrow reads; pip install pyarrow") from error
    try:
        yield pyarrow
    except AlmaError:
        raise
    except Exception as error:  # of any kind: damaged files lead it anywhere
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise AlmaError(f"{source.label}: broken {kind} data ({reason}); fetch the file again") from error


def _table_blocks(part: FilePart) -> Iterator[tuple[Block, int]]:
    """Read the columns of a table, a few hundred rows at a time."""
    source, first_row, done = part.source, 1, 0
    size = source.stamp[0]
    with reading_table(source) as pyarrow:
        opened = _parquet_batches(pyarrow, part) if source.form == "parquet" else _arrow_batches(pyarrow, source)
        for batch, row, share in opened:
            first_row = row or first_row
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                columns = [column.to_pylist() for column in batch.slice(start, _ROWS_AT_ONCE).columns]
                rows = [*zip(*columns, strict=True)]
                position = int(size * share)
                yield Block(source, rows, first_row), position - done
                first_row, done = first_row + len(rows), position


def _parquet_batches(pyarrow: Any, part: FilePart) -> Iterator[tuple[Any, int, float]]:
    """Yield batches of the columns that are needed, the first with its row number, and the share that is read."""
    with pyarrow.parquet.ParquetFile(part.source.path) as file:
        columns = _columns(part.source, file.schema_arrow.names)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        row, done, wanted = 1 + sum(sizes[: part.start]), 0, range(len(sizes))[part.start : part.end]
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=wanted, columns=list(dict.fromkeys(columns))):
            done += len(batch)
            yield batch.select(columns), row, done / max(sum(sizes), 1)
            row = 0


def _arrow_batches(pyarrow: Any, source: Source) -> Iterator[tuple[Any, int, float]]:
    """The same of Arrow's streaming format, which ``save_to_disk`` of ``datasets`` writes, or of its file format."""
    with pyarrow.memory_map(str(source.path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        columns = _columns(source, opened.schema.names)
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        for number, batch in enumerate(batches):
            yield batch.select(columns), int(number == 0), min(1.0, file.tell() / max(file.size(), 1))


def _columns(source: Source, names: Sequence[str]) -> list[str]:
    """Return the columns to read: that of the text and that of the groups, if there is one."""
    wanted = [(source.field, "text with --field")]
    if source.by is not None:
        wanted.append((source.by, "groups with --by"))
    for column, what in wanted:
        if names.count(column) != 1:
            found = f"{names.count(column)} columns {column!r}" if column in names else f"no column {column!r}"
            raise AlmaError(
                f"{source.label}: {found}, the columns are {', '.join(map(repr, names))}; name the column of the {what}"
            )
    return [column for column, _ in wanted]
