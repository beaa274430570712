"""The input in pieces that any worker can read alone, their blocks, and the documents in these.

A piece is a byte range of a plain file, row groups, or whole files; a block is about one MiB of it that begins and ends
between two documents.

A piece is the unit of every pass and of what a killed command need not do again. Where pieces are cut decides nothing
about the result: their documents, one piece after the other, are those of the files.
"""

import datetime
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence, Union, cast

from data_prep.build_folder import recorded_name
from data_prep.compression import DecompressedFile
from fairseq_alma.errors import AlmaError

PERIODS = {"year": 4, "month": 7, "day": 10}
"""Characters of a date that name one: ``2024-05-17``."""
_EMPTY_LINE = re.compile(r"\n\s*\n")
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_MAX_GROUP_NAME = 100


@dataclass(frozen=True)
class Group:
    """What puts documents into groups: the value of a field, or the year, month or day that it begins with.

    Attributes:
        field: of the record.
        period: one of `PERIODS`; None: the whole value.
    """

    field: str
    period: Optional[str] = None

    def of(self, value: object, block: "Block", number: int) -> str:
        """Return the group of a value, in a line or row of a block. Raises AlmaError if there is none."""
        name = value.isoformat() if isinstance(value, datetime.date) else value
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_GROUP_NAME:
            if self.period is None:
                return name
            length = PERIODS[self.period]
            if len(name) >= length and _DATE.fullmatch(name[:length]):
                return name[:length]
        needed = "a word or a whole number" if self.period is None else f"a date with its {self.period} (2024-05-17)"
        raise AlmaError(
            f"{block.where(number)}: {self.field!r} is {value!r:.40}, {needed} is needed; mend the record or --by"
        )


@dataclass(frozen=True)
class Block:
    """A piece of one input that begins and ends between two documents.

    Attributes:
        label: how messages call the input.
        form: ``text`` (documents separated by an empty line), ``lines``, ``jsonl``, ``parquet`` or ``arrow``.
        field: field (``jsonl``) or column (``parquet``, ``arrow``) that holds the text.
        first_line: number of the first line (for a table: row) in the input, from 1; of a piece of it, in the piece.
        content: the bytes; for a table the column's values, or pairs of them and those of ``group``'s field.
        group: what puts its documents into groups; None: nothing does.
        before: the file that the block is of a piece of, and its bytes before the piece; None: a whole input.
    """

    label: str
    form: str
    field: str
    first_line: int
    content: Union[bytes, Sequence[object]]
    group: Optional[Group] = None
    before: Optional[tuple[Path, int]] = None

    def where(self, number: int) -> str:
        """Return how messages call the line or row that is ``number`` lines behind the first one."""
        if self.form in ("parquet", "arrow"):
            return f"{self.label}, row {self.first_line + number}"
        return f"{self.label}, line {self._lines_before() + self.first_line + number}"

    def _lines_before(self) -> int:
        """Count the lines before a piece; only messages need them."""
        if self.before is None:
            return 0
        path, left = self.before
        lines = 0
        with open(path, "rb") as file:
            while left > 0 and (content := file.read(min(left, BLOCK_SIZE))):
                lines += content.count(b"\n")
                left -= len(content)
        return lines


def documents_of(block: Block) -> list[str]:
    """Return the documents of a block, without white space around them; what is empty then is no document.

    Raises:
        AlmaError: the block is no UTF-8 text, or a record lacks the field.
    """
    return [stripped for text in _SPLITTERS[block.form](block) if (stripped := text.strip())]


def groups_of(block: Block) -> list[str]:
    """Return the group of each document of a block of records.

    Raises:
        AlmaError: as `documents_of`, and where a record's value names no group.
    """
    group = block.group
    assert group is not None
    return [
        group.of(_value(record, group.field, "--by", block, number), block, number)
        for number, record in _records(block)
        if _text_of(record, block, number).strip()
    ]


def text_of(block: Block) -> str:
    """Return a block of bytes as text with plain line feeds.

    Raises:
        AlmaError: it is no UTF-8 text.
    """
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
        where = block.where(text.count("\n", 0, null))
        raise AlmaError(f"{where}: binary data (a NUL byte) found; {remedy}")
    if block.first_line == 1 and block.before is None:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n") if "\r" in text else text


def _paragraphs(block: Block) -> list[str]:
    return _EMPTY_LINE.split(text_of(block))


def _lines(block: Block) -> list[str]:
    return text_of(block).split("\n")


def _records(block: Block) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the records of a block, each with the number of lines or rows before it."""
    if block.form == "jsonl":
        for number, line in enumerate(text_of(block).split("\n")):
            if line and not line.isspace():
                yield number, _parse(line, block, number)
    else:
        names = [block.field] if block.group is None else [block.field, block.group.field]
        for number, row in enumerate(block.content):
            values = [row] if block.group is None else cast(Sequence[object], row)
            yield number, dict(zip(names, values, strict=True))


def _texts(block: Block) -> list[str]:
    return [_text_of(record, block, number) for number, record in _records(block)]


def _parse(line: str, block: Block, number: int) -> dict[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AlmaError(
            f"{block.where(number)}: not JSON ({error}); each line must be one JSON object, or choose another --format"
        ) from error
    if not isinstance(record, dict):
        raise AlmaError(
            f"{block.where(number)}: a JSON {type(record).__name__} found; each line must be one JSON object"
        )
    return record


def _value(record: dict[str, object], field: str, flag: str, block: Block, number: int) -> object:
    if field not in record:
        raise AlmaError(
            f"{block.where(number)}: no field {field!r}, the fields are {', '.join(map(repr, record)) or 'none'}; name "
            f"the field that holds the {'text' if flag == '--field' else 'group'} with {flag}"
        )
    return record[field]


def _text_of(record: dict[str, object], block: Block, number: int) -> str:
    field, value = block.field, _value(record, block.field, "--field", block, number)
    if not isinstance(value, str):
        raise AlmaError(
            f"{block.where(number)}: {field!r} is {value!r:.40}, it must be a text; mend the record or give another "
            "--field"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AlmaError(
            f"{block.where(number)}: {field!r} holds half a surrogate pair, which is no text; mend the record"
        ) from error
    return value


_SPLITTERS: dict[str, Callable[[Block], list[str]]] = {
    "text": _paragraphs,
    "lines": _lines,
    "jsonl": _texts,
    "parquet": _texts,
    "arrow": _texts,
}


BLOCK_SIZE = 1 << 20
MAX_DOCUMENT_SIZE = 1 << 28
SMALLEST_PIECE, LARGEST_PIECE = 1 << 23, 1 << 28  # bytes
MOST_PIECES = 1 << 12  # unless there are more files than can be joined, or pieces would be too large
TABLES = {"parquet": "Parquet", "arrow": "Arrow"}
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """One file of input.

    Attributes:
        path: where it is read.
        label: how messages call it.
        argument: number of the command's argument that named it or its folder, from 0.
        form: how documents stand in it (see `Block`).
        field: where the text is in a record.
        is_copy: it is the copy of what came through standard input or a pipe.
        group: what puts its documents into groups, if anything.
    """

    path: Path
    label: str
    argument: int
    form: str
    field: str
    is_copy: bool = False
    group: Optional[Group] = None

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        return "-" if self.is_copy else recorded_name(self.path)

    @property
    def size(self) -> int:
        """Size of the file in bytes, compressed as it is."""
        return self.path.stat().st_size

    @property
    def stamp(self) -> tuple[object, ...]:
        """What differs when the file does."""
        return self.size, self.path.stat().st_mtime_ns

    @property
    def is_packed(self) -> bool:
        """Whether it is text that is compressed, so that reading begins at its beginning."""
        if self.form in TABLES:
            return False
        with DecompressedFile(self.path, self.label) as file:
            return file.is_packed

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks of the whole file, see `Part.blocks`."""
        return Part(self).blocks()


@dataclass(frozen=True)
class Part:
    """A file, or what begins in a range of it: of bytes, or of the row groups of a Parquet file.

    Attributes:
        source: the file.
        start: first byte or row group.
        end: the one behind the last; None: the end of the file.
    """

    source: Source
    start: int = 0
    end: Optional[int] = None

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks, each with the number of bytes of the file that have been read with it.

        Raises:
            AlmaError: the file is broken, or a document is too long.
        """
        return _table_blocks(self) if self.source.form in TABLES else _byte_blocks(self)


@dataclass(frozen=True)
class Piece:
    """Parts of the input that one task reads, one after the other.

    Attributes:
        parts: of one large file, or several small files.
        size: bytes of their files.
    """

    parts: tuple[Part, ...]
    size: int


def num_workers_for(sources: Sequence[Source]) -> int:
    """Return how many processes have something to do: what is small is done sooner than they begin."""
    return max(1, sum(source.size for source in sources) // SMALLEST_PIECE)


def cut_into_pieces(sources: Sequence[Source]) -> list[Piece]:
    """Cut files into pieces, by nothing but what they are: the same command finds the same pieces again."""
    wanted = sum(source.size for source in sources) // MOST_PIECES
    wanted = min(max(wanted, SMALLEST_PIECE), LARGEST_PIECE)
    pieces: list[Piece] = []
    parts: list[Part] = []
    size = 0
    for source in sources:
        for part, part_size in _parts_of(source, wanted):
            parts.append(part)
            size += part_size
            if size >= wanted:
                pieces.append(Piece(tuple(parts), size))
                parts, size = [], 0
    return [*pieces, Piece(tuple(parts), size)] if parts else pieces


def _parts_of(source: Source, wanted: int) -> Iterator[tuple[Part, int]]:
    """Yield the parts of a file, each with its size in bytes."""
    size = source.size
    if size <= wanted or source.form == "arrow" or source.is_packed:
        yield Part(source), size
    elif source.form == "parquet":
        yield from _row_groups_of(source, wanted)
    else:
        for start in range(0, size, wanted):
            end = start + wanted
            yield Part(source, start, end if end < size else None), min(end, size) - start


def _row_groups_of(source: Source, wanted: int) -> Iterator[tuple[Part, int]]:
    from pyarrow import parquet

    with reading_table(source), parquet.ParquetFile(source.path) as file:
        number = file.metadata.num_row_groups
    together = max(1, number * wanted // source.size)
    for start in range(0, max(number, 1), together):
        end = start + together
        yield Part(source, start, end if end < number else None), source.size * together // max(number, together)


def _byte_blocks(part: Part) -> Iterator[tuple[Block, int]]:
    """Cut at the last boundary between documents that each MiB brings; a part ends at the first one behind its range.

    What ends a part so begins the next one: both look for the first boundary at or behind the same byte.
    """
    source, end = part.source, part.end
    first_line, at = 1, part.start  # of what is pending
    before = None
    pending = bytearray()
    with DecompressedFile(source.path, source.label) as file:
        file.skip(part.start)
        is_begun, is_ended = part.start == 0, False
        while not is_ended:
            chunk = file.read(BLOCK_SIZE)
            searched = max(0, len(pending) - BLOCK_SIZE)  # a blank line may have begun in what came before
            pending += chunk
            if not is_begun:
                begin = _first_boundary(pending, source.form, 0)
                if begin == 0 and chunk and len(pending) <= MAX_DOCUMENT_SIZE:
                    continue
                at += begin
                if begin == 0 or (end is not None and at > end):
                    return  # no document begins here
                del pending[:begin]
                is_begun, before, searched = True, (source.path, at), 0
            cut = 0
            if end is not None and at + len(pending) > end:
                cut = _first_boundary(pending, source.form, max(0, end - at))
                is_ended = cut > 0
            if not chunk:
                cut, is_ended = len(pending), True
            cut = cut or _last_boundary(pending, source.form, searched)
            if cut == 0:
                if len(pending) > MAX_DOCUMENT_SIZE:
                    where = Block(source.label, source.form, source.field, first_line, b"", before=before).where(0)
                    raise AlmaError(_too_long(source, where))
                continue
            content = bytes(pending[:cut])
            block = Block(source.label, source.form, source.field, first_line, content, source.group, before)
            yield block, file.position - part.start
            first_line += content.count(b"\n")
            del pending[:cut]
            at += cut


def _first_boundary(content: bytearray, form: str, start: int) -> int:
    """Return where the first document ends whose end is at ``start`` or behind it, 0 if none does."""
    if form != "text":
        return content.find(b"\n", start) + 1
    match = _BLANK_LINE.search(content, start)
    return match.start() + 1 if match else 0


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


def _too_long(source: Source, where: str) -> str:
    separator = "an empty line" if source.form == "text" else "a line feed"
    return (
        f"{where}: a document of more than {MAX_DOCUMENT_SIZE >> 20} MiB found; documents must be separated by "
        f"{separator}, or choose another --format"
    )


@contextmanager
def reading_table(source: Source) -> Iterator[None]:
    """Raise AlmaError for whatever pyarrow finds wrong with a table, or where it is not installed."""
    kind = TABLES[source.form]
    try:
        import pyarrow
    except ImportError as error:
        raise AlmaError(f"{source.label}: {kind} data, which pyarrow reads; pip install pyarrow") from error
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise AlmaError(f"{source.label}: broken {kind} data ({error}); fetch the file again") from error


def _table_blocks(part: Part) -> Iterator[tuple[Block, int]]:
    """Read one column of a table, a few hundred rows at a time."""
    source = part.source
    rows = _parquet_rows if source.form == "parquet" else _arrow_rows
    with reading_table(source):
        for first_row, values, share in rows(part):
            block = Block(source.label, source.form, source.field, first_row, values, source.group)
            yield block, int(source.size * share)


def _parquet_rows(part: Part) -> Iterator[tuple[int, list[Any], float]]:
    """Yield a row's number, the column's values from there on, and the share of the file that is read with them."""
    from pyarrow import parquet

    with parquet.ParquetFile(part.source.path) as file:
        columns = _columns(part.source, file.schema_arrow.names)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        groups = range(len(sizes))[part.start : part.end]
        row, num_rows = 1 + sum(sizes[: part.start]), max(sum(sizes), 1)
        done = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=columns):
            done += len(batch)
            yield row, _values(batch, columns), done / num_rows
            row += len(batch)


def _arrow_rows(part: Part) -> Iterator[tuple[int, list[Any], float]]:
    """The same of Arrow's streaming format, which ``save_to_disk`` of ``datasets`` writes, or its file format."""
    from pyarrow import ipc, memory_map

    source, row = part.source, 1
    with memory_map(str(source.path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            opened = ipc.open_file(file)
            batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            opened = batches = ipc.open_stream(file)
        columns = _columns(source, opened.schema.names)
        for batch in batches:
            share = min(1.0, file.tell() / max(source.size, 1))
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                values = _values(batch.slice(start, _ROWS_AT_ONCE), columns)
                yield row, values, share
                row += len(values)


def _columns(source: Source, names: Sequence[str]) -> list[str]:
    """Return the columns to read: that of the text and that of the groups, if there are any."""
    wanted = {source.field: "text with --field"}
    if source.group is not None:
        wanted.setdefault(source.group.field, "groups with --by")
    for column, what in wanted.items():
        if column not in names:
            raise AlmaError(
                f"{source.label}: no column {column!r}, the columns are {', '.join(map(repr, names))}; name the "
                f"column of the {what}"
            )
    return [source.field, *([] if source.group is None else [source.group.field])]


def _values(batch: Any, columns: Sequence[str]) -> list[Any]:
    """Return the values of a column, or the rows of several."""
    read = [batch.column(column).to_pylist() for column in columns]
    return read[0] if len(read) == 1 else [*zip(*read, strict=True)]
