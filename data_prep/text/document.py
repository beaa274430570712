"""Blocks of input, about one MiB that begins and ends between two documents, and the documents in them."""

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Optional, Sequence, Union, cast

from data_prep.compression import open_raw
from fairseq_alma.errors import AlmaError

PERIODS = {"year": 4, "month": 7, "day": 10}
"""Characters of a date that name one: ``2024-05-17``."""
_BLANK_LINE = re.compile(r"\n\s*\n")
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_MAX_GROUP_NAME = 100
_READ_AT_ONCE = 1 << 20


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
    before: Optional[tuple[Union[Path, str], int]] = None

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
        with open_raw(path) as file:
            while left > 0 and (content := file.read(min(left, _READ_AT_ONCE))):
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
    return _BLANK_LINE.split(text_of(block))


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
