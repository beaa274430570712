"""Find the input files of ``alma-prep-text``, split them into pieces for workers, and read documents in blocks.

A piece is a byte range of an uncompressed file, a range of row groups of a Parquet file, or one or more complete files.
A block contains only complete documents: about one MiB of a piece, or at most `_ROWS_AT_ONCE` rows of a Parquet file.
The documents do not depend on the sizes of pieces and blocks.
"""

import datetime
import json
import mmap
import os
import re
import shutil
import stat
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Union

from fairseq_alma.errors import AlmaError, naming, refusing_damage
from fairseq_alma.files import COMPRESSION_SUFFIXES, DecompressedFile
from fairseq_alma.terminal import print_line

STANDARD_INPUT = "-"
FORMATS = ("auto", "text", "lines", "file", "jsonl", "parquet")
_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|dev)(?=[-_.])")
_ABOUT_DATA = re.compile(
    r"((readme|licen[cs]e)([._-][a-z0-9_-]*)?|copying|notice|citation|changelog|dataset_infos?|dataset_card|"
    r"checksums?|sha256sums?)(\.(md|txt|rst|json|cff|bib))?",
    re.IGNORECASE,
)
PERIODS = {"year": 4, "month": 7, "day": 10}  # length of the prefix of a date such as ``2024-05-17``
BLOCK_SIZE = 1 << 20
MAX_DOCUMENT_SIZE = 1 << 28
PIECE_SIZE = 1 << 23  # approximate size of a piece in bytes of the file
_SPLIT: Mapping[str, Callable[[str], list[str]]] = {  # format of text -> function that splits a text into documents
    "text": re.compile(r"\n\s*\n").split,
    "lines": lambda text: text.split("\n"),
    "file": lambda text: [text],
}
FORMS_OF_TEXT = tuple(_SPLIT)  # formats without fields
_BOUNDARY = {"text": re.compile(rb"\n(?=[ \t\r\f\v]*\n)"), "file": re.compile(rb"(?!)")}  # (?!) never matches
_LINE_END = re.compile(rb"\n")
_JSON_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\{[ \t]*"[^"\n]*"[ \t]*:')
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?(?!-?\d)")
_MAX_GROUP_NAME = 100
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """Input file, its format, and the fields that contain the text and the group of a document."""

    path: Path
    label: str  # name of the file in messages
    argument: int  # index of the INPUT argument that names the file or its folder
    form: str  # format: one of `FORMATS` except ``auto``
    field: str  # field or column with the text
    is_copy: bool = False  # whether the file is a copy of standard input or of a pipe
    by: Optional[str] = None  # field or column with the group of a document (``--by``)
    period: Optional[str] = None  # one of `PERIODS` if groups are periods of dates; None if each value is a group

    @property
    def stamp(self) -> tuple[int, int]:
        """Return (size in bytes, modification time in nanoseconds), to detect changes to the file."""
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Block:
    """Consecutive complete documents of one file: about one MiB, or at most `_ROWS_AT_ONCE` rows of a Parquet file."""

    source: Source
    content: Union[bytes, Sequence[tuple]]  # bytes; for Parquet, rows ``(text,)`` or ``(text, group)``
    start: int = 0  # offset of the first byte in the decompressed file; for Parquet, index of the first row
    bytes_read: int = 0  # number of bytes of the file that were read for the block

    def where(self, number: int) -> str:
        """Return the label of the file and the number of a line or row (counted from 1) in the file, for messages.

        Args:
            number: index of the line or row in the block.
        """
        if self.source.form == "parquet":
            return f"{self.source.label}, row {self.start + number + 1}"
        line = number + 1
        with open(self.source.path, "rb") as raw:
            file = DecompressedFile(raw, self.source.label)
            for start in range(0, self.start, BLOCK_SIZE):
                line += file.read(min(BLOCK_SIZE, self.start - start)).count(b"\n")
        return f"{self.source.label}, line {line}"


def documents_of(block: Block) -> list[str]:
    """Return the documents of a block. Raises AlmaError as `documents_and_groups_of` does."""
    return [document for document, _ in documents_and_groups_of(block)]


def documents_and_groups_of(block: Block) -> list[tuple[str, str]]:
    """Return (document, group) for each document of a block. Without ``--by``, the group is an empty string.

    Remove white space at the start and end of a document, and drop documents that contain only white space.

    Raises:
        AlmaError: the block is not UTF-8 text, a record lacks a field, or a field has an invalid value.
    """
    source = block.source
    if source.form in FORMS_OF_TEXT:
        return [(stripped, "") for each in _SPLIT[source.form](_text_of(block)) if (stripped := each.strip())]
    documents = []
    for number, value, group in _records(block):
        if not isinstance(value, str):
            raise AlmaError(
                f"{block.where(number)}: expected a string in field {source.field!r}, found {value!r:.40}; correct the "
                "record, or give another --field"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise AlmaError(
                f"{block.where(number)}: expected valid Unicode in field {source.field!r}, found an unpaired "
                "surrogate; correct the record"
            ) from error
        if stripped := value.strip():
            documents.append((stripped, "" if source.by is None else _group_name(block, number, group)))
    return documents


def _text_of(block: Block) -> str:
    # with line feeds instead of CRLF and without a byte-order mark
    content = block.content
    assert isinstance(content, bytes)
    remedy = "convert the file to UTF-8 (iconv), unpack an archive, or remove the file from the input"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        where = block.where(content.count(b"\n", 0, error.start))
        raise AlmaError(f"{where}: expected UTF-8 text, found byte 0x{content[error.start]:02x}; {remedy}") from error
    if (null := text.find("\0")) >= 0:
        where = block.where(text.count("\n", 0, null))
        raise AlmaError(f"{where}: expected UTF-8 text, found binary data (a NUL byte); {remedy}")
    if block.start == 0:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n") if "\r" in text else text


def _records(block: Block) -> Iterator[tuple[int, object, object]]:
    """Yield (index of the line or row in the block, text, group) for each record."""
    if not isinstance(block.content, bytes):
        yield from ((number, row[0], row[-1]) for number, row in enumerate(block.content))
        return
    field, by = block.source.field, block.source.by
    for number, line in enumerate(_text_of(block).split("\n")):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise AlmaError(
                f"{block.where(number)}: expected one JSON object on each line, found an invalid line ({error}); "
                "correct the line, choose another --format, or convert an array (jq -c '.[]')"
            ) from error
        if not isinstance(record, dict):
            raise AlmaError(
                f"{block.where(number)}: expected one JSON object on each line, found a JSON {type(record).__name__}; "
                "correct the line, or choose another --format"
            )
        for name, flag in ((field, "--field"), (by, "--by")):
            if name is not None and name not in record:
                fields = f"fields {', '.join(map(repr, record))}" if record else "no fields"
                raise AlmaError(
                    f"{block.where(number)}: expected a field {name!r}, found {fields}; name the correct field with "
                    f"{flag}"
                )
        yield number, record[field], record[by] if by is not None else None


def _group_name(block: Block, number: int, value: object) -> str:
    period = block.source.period
    name = value.isoformat() if isinstance(value, datetime.date) else value
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_GROUP_NAME:
        if period is None:
            return name
        if (date := _DATE.match(name)) and len(date[0]) >= PERIODS[period]:
            return name[: PERIODS[period]]
    any_name = f"an integer, or 1 to {_MAX_GROUP_NAME} printable characters"
    expected = any_name if period is None else f"a date with a {period}, such as 2024-05-17"
    raise AlmaError(
        f"{block.where(number)}: expected {expected} in field {block.source.by!r}, found {value!r:.40}; correct the "
        "record, or give another --by"
    )


@dataclass(frozen=True)
class FilePart:
    """A complete file, a byte range with complete documents, or a range of row groups of a Parquet file."""

    source: Source
    start: int = 0  # first byte or row group
    end: Optional[int] = None  # first byte or row group after the range; None for the end of the file

    def blocks(self) -> Iterator[Block]:
        """Yield the documents in blocks. Raises AlmaError if the file is damaged or a document is too long."""
        source, start = self.source, self.start
        if source.form == "parquet":
            yield from _table_blocks(self)
            return
        boundary = _BOUNDARY.get(source.form, _LINE_END)
        pending, done, chunk = bytearray(), start, b"-"
        with open(source.path, "rb") as raw:
            file = DecompressedFile(raw, source.label)
            if start:
                raw.seek(start)
            while chunk:
                left = BLOCK_SIZE if self.end is None else self.end - start - len(pending)
                chunk = file.read(min(left, BLOCK_SIZE))
                searched = max(0, len(pending) - BLOCK_SIZE)  # A blank line may have begun in an earlier chunk.
                pending += chunk
                # A block ends at the last boundary between two documents in the bytes read so far.
                line_end = len(pending)
                while chunk and (line_end := pending.rfind(b"\n", searched, line_end)) >= 0:
                    if boundary.match(pending, line_end):
                        break
                cut = line_end + 1 if chunk else line_end
                if cut > 0:
                    yield Block(source, bytes(pending[:cut]), start, raw.tell() - done)
                    start, done = start + cut, raw.tell()
                    del pending[:cut]
                elif len(pending) > MAX_DOCUMENT_SIZE:
                    separator = "an empty line" if source.form in ("text", "file") else "a line feed"
                    raise AlmaError(
                        f"{Block(source, b'', start).where(0)}: expected documents of at most "
                        f"{MAX_DOCUMENT_SIZE >> 20} MiB, found a longer document; separate documents by {separator}, "
                        "or choose another --format"
                    )


Piece = tuple[FilePart, ...]  # input of one task: one range of a large file, or one or more complete files


@dataclass
class Batch:
    """Documents of consecutive blocks of a piece: at least half a million characters, unless the piece ends."""

    documents: list[str]
    groups: list[str]  # group of each document
    arguments: list[int]  # index of the INPUT of each document
    label: str = ""  # name of the last file
    bytes_read: int = 0


def batches_of(piece: Piece) -> Iterator[Batch]:
    """Yield the documents of a piece in batches, which are faster to process than the blocks of many small files.

    Raises:
        AlmaError: a file is damaged, a document is too long or invalid.
    """
    batch, size = Batch([], [], []), 0
    for block in (block for part in piece for block in part.blocks()):
        pairs = documents_and_groups_of(block)
        batch.documents += [document for document, _ in pairs]
        batch.groups += [group for _, group in pairs]
        batch.arguments += [block.source.argument] * len(pairs)
        batch.label, batch.bytes_read = block.source.label, batch.bytes_read + block.bytes_read
        size += sum(len(document) for document, _ in pairs)
        if size >= BLOCK_SIZE // 2:
            yield batch
            batch, size = Batch([], [], []), 0
    yield batch


def cut_into_pieces(sources: Sequence[Source]) -> list[Piece]:
    """Divide files into pieces of about `PIECE_SIZE` bytes: split large files, and combine consecutive small files."""
    pieces: list[list[FilePart]] = []
    size = PIECE_SIZE + 1  # size of the last piece. This initial value makes the next file begin a new piece.
    for source in sources:
        starts, own_size = _part_starts(source), source.stamp[0]
        if len(starts) == 1 and size + own_size <= PIECE_SIZE:
            pieces[-1].append(FilePart(source))
            size += own_size
        else:
            ends: list[Optional[int]] = [*starts[1:], None]
            pieces += [[FilePart(source, *part)] for part in zip(starts, ends, strict=True)]
            size = own_size if len(starts) == 1 else PIECE_SIZE + 1
    return [tuple(piece) for piece in pieces]


def _part_starts(source: Source) -> list[int]:
    """Return the start of each `FilePart` of a file: a byte offset or, for Parquet, the index of a row group."""
    size = source.stamp[0]
    if size <= PIECE_SIZE:
        return [0]
    if source.form == "parquet":
        with _open_table(source) as table:
            number = table.metadata.num_row_groups
        return [*range(0, max(number, 1), max(1, number * PIECE_SIZE // size))]
    starts = [0]
    with open(source.path, "rb") as raw:
        if DecompressedFile(raw, source.label).is_packed:
            return starts
        with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for position in range(PIECE_SIZE, size, PIECE_SIZE):
                if position >= starts[-1]:
                    found = _BOUNDARY.get(source.form, _LINE_END).search(content, position)
                    if found is None or found.end() == size:
                        break
                    starts.append(found.end())
    return starts


@contextmanager
def _open_table(source: Source) -> Iterator[Any]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise AlmaError(f"{source.label}: pyarrow is not installed; run pip install pyarrow") from error
    with (
        refusing_damage(f"{source.label}: broken Parquet data", "download the file again"),
        ParquetFile(source.path) as table,
    ):
        yield table


def _table_blocks(part: FilePart) -> Iterator[Block]:
    source = part.source
    with _open_table(source) as table:
        names = table.schema_arrow.names
        columns = [source.field] if source.by is None else [source.field, source.by]
        for column, flag in zip(columns, ("--field", "--by"), strict=False):
            if names.count(column) != 1:
                raise AlmaError(
                    f"{source.label}: expected one column {column!r}, found columns {', '.join(map(repr, names))}; "
                    f"name the correct column with {flag}"
                )
        sizes = [table.metadata.row_group(number).num_rows for number in range(table.metadata.num_row_groups)]
        groups, row = range(len(sizes))[part.start : part.end], sum(sizes[: part.start])
        for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=list(dict.fromkeys(columns))):
            rows = [*zip(*(column.to_pylist() for column in batch.select(columns).columns), strict=True)]
            yield Block(source, rows, row, source.stamp[0] * len(rows) // sum(sizes))
            row += len(rows)


def find_sources(
    inputs: Sequence[str],
    form: str,
    field: str,
    folder: Optional[Path],
    out: Optional[Path] = None,
    by: Optional[str] = None,
    period: Optional[str] = None,
) -> list[Source]:
    """Return all input files. The files of a folder and its subfolders are sorted by path.

    Copy standard input and pipes to files, because every input is read more than once.

    Args:
        inputs: files, folders, pipes (``<(zcat a.gz)``, ``/dev/stdin``), or ``-``.
        form: format of all files; ``auto`` to detect the format of each file by name and content.
        field: field or column with the text.
        folder: folder for copies of pipes; None: pipes are not allowed.
        out: folder of the stream; ignored if it is inside an input folder.
        by: field or column with the group of a document, see `Source`.
        period: period of the dates in field ``by``, see `Source`.

    Raises:
        AlmaError: an input cannot be read; or a folder is empty, or contains special files or several splits of data.
    """
    stream = None if out is None else Path(os.path.realpath(out))  # resolve() raises RuntimeError on circular links.
    found: list[Optional[list[Path]]] = []  # None for a pipe. Pipes are read after all other checks.
    for given in inputs:
        path, real = Path(given), Path(os.path.realpath(given))
        if stream in (real, *real.parents):
            raise AlmaError(f"{given}: expected text outside {out}, the folder to write; give text in another folder")
        if not given or (given != STANDARD_INPUT and not path.exists()):
            label = given or "INPUT ''"
            other = "" if folder is None else ", or - for standard input"
            raise AlmaError(f"{label}: expected a file or folder, found nothing; give a path{other}")
        if given == STANDARD_INPUT and sys.stdin is None:
            raise AlmaError("INPUT -: standard input is closed; give a file or folder")
        mode = stat.S_IFIFO if given == STANDARD_INPUT else path.stat().st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            raise AlmaError(f"{given}: expected a file, folder or pipe, found a device or a socket; give another INPUT")
        found.append(None if stat.S_ISFIFO(mode) else _files_in(path, stream, form) if stat.S_ISDIR(mode) else [path])
    sources = []
    for argument, (given, files) in enumerate(zip(inputs, found, strict=True)):
        label = "standard input" if given == STANDARD_INPUT else given
        if is_pipe := files is None:
            if folder is None:
                raise AlmaError(f"{label}: this command cannot read a pipe; write the text to a file first")
            files = [folder / f"input-{argument}"]
            with (
                nullcontext(sys.stdin.buffer) if given == STANDARD_INPUT else open(given, "rb") as pipe,
                naming(files[0]),
                open(files[0], "wb") as file,
            ):
                shutil.copyfileobj(pipe, file, BLOCK_SIZE)
        for path in files:
            own_label = label if is_pipe else str(path)
            own_form = _form_of(path, own_label) if form == "auto" else form
            sources.append(Source(path, own_label, argument, own_form, field, is_pipe, by, period))
    return sources


def _files_in(folder: Path, stream: Optional[Path], form: str) -> list[Path]:
    def refuse(error: OSError) -> None:  # os.walk ignores folders that it cannot read.
        raise error

    files: list[Path] = []
    ignored: list[str] = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(root, name).resolve() != stream]
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                print_line(f"note: {Path(root, name)}: this link to a folder is ignored", sys.stderr)
        visible = sorted(name for name in names if not name.startswith("."))
        # If a folder contains only files such as README, they are the input.
        kept = [name for name in visible if not _ABOUT_DATA.fullmatch(name)] or visible
        splits = list(dict.fromkeys(match[0] for name in kept if (match := _SPLIT_NAME.match(name))))
        if len(splits) > 1 and form != "file":  # Source code may have names such as train.py and test_a.py.
            raise AlmaError(
                f"{root}: expected one split of a data set, found the splits {', '.join(splits)}; give the files of "
                f"one split, such as {Path(root, splits[0])}*"
            )
        ignored += [str(Path(root, name)) for name in visible if name not in kept]
        files += [Path(root, name) for name in kept]
    for path in files:
        if not path.is_file():
            raise AlmaError(
                f"{path}: expected a regular file, found a special file or a broken link; remove this path, or give "
                "the text files as INPUT"
            )
    if not files:
        raise AlmaError(f"{folder}: expected a folder with text files, found no file; give another folder")
    if ignored:
        shown = ", ".join(ignored[:5]) + (", …" if len(ignored) > 5 else "")
        print_line(f"note: {folder}: {len(files):,} files used, {len(ignored):,} ignored ({shown})", sys.stderr)
    return sorted(files)


def _form_of(path: Path, label: str) -> str:
    name = Path(path.name.lower())
    form = _FORMS.get((Path(name.stem) if name.suffix in COMPRESSION_SUFFIXES else name).suffix, "text")
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
        file.seek(0)
        if form == "text" and _JSON_OBJECT.match(DecompressedFile(file, label).read(1 << 12)):
            raise AlmaError(
                f"{label}: the file begins with a JSON object; give --format jsonl, or --format text to read it as text"
            )
    return form
