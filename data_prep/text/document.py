"""Blocks of input, and the documents in them.

The main process cuts the input into blocks of about one MiB without looking at documents; worker processes take a
block apart. Every pass cuts the same blocks, so a document is known by its place in the order of all documents.
"""

import datetime
import json
import re
from dataclasses import dataclass
from typing import Callable, Iterator, Optional, Sequence, Union, cast

from fairseq_alma.errors import AlmaError

PERIODS = {"year": 4, "month": 7, "day": 10}
"""Characters of a date that name one: ``2024-05-17``."""
_BLANK_LINE = re.compile(r"\n\s*\n")
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

    def of(self, value: object, where: str) -> str:
        """Return the group of a value. Raises AlmaError if there is none."""
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
        raise AlmaError(f"{where}: {self.field!r} is {value!r:.40}, {needed} is needed; mend the record or --by")


@dataclass(frozen=True)
class Block:
    """A piece of one input that begins and ends between two documents.

    Attributes:
        label: how messages call the input.
        form: ``text`` (documents separated by an empty line), ``lines``, ``jsonl``, ``parquet`` or ``arrow``.
        field: field (``jsonl``) or column (``parquet``, ``arrow``) that holds the text.
        first_line: number of the first line (for ``parquet``: row) in the input, from 1.
        content: the bytes; for a table the column's values, or pairs of them and those of ``group``'s field.
        group: what puts its documents into groups; None: nothing does.
    """

    label: str
    form: str
    field: str
    first_line: int
    content: Union[bytes, Sequence[object]]
    group: Optional[Group] = None


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
    pairs = ((record, where) for record, where in _records(block) if _text_of(record, block, where).strip())
    return [group.of(_value(record, group.field, "--by", where), where) for record, where in pairs]


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
        line = block.first_line + content.count(b"\n", 0, error.start)
        found = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise AlmaError(f"{block.label}, line {line}: {found}; {remedy}") from error
    null = text.find("\0")
    if null >= 0:
        line = block.first_line + text.count("\n", 0, null)
        raise AlmaError(f"{block.label}, line {line}: binary data (a NUL byte) found; {remedy}")
    if block.first_line == 1:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n") if "\r" in text else text


def _paragraphs(block: Block) -> list[str]:
    return _BLANK_LINE.split(text_of(block))


def _lines(block: Block) -> list[str]:
    return text_of(block).split("\n")


def _records(block: Block) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the records of a block, each with how messages call it."""
    if block.form == "jsonl":
        for number, line in enumerate(text_of(block).split("\n"), start=block.first_line):
            if line and not line.isspace():
                where = f"{block.label}, line {number}"
                yield _parse(line, where), where
    else:
        names = [block.field] if block.group is None else [block.field, block.group.field]
        for number, row in enumerate(block.content, start=block.first_line):
            values = [row] if block.group is None else cast(Sequence[object], row)
            yield dict(zip(names, values, strict=True)), f"{block.label}, row {number}"


def _texts(block: Block) -> list[str]:
    return [_text_of(record, block, where) for record, where in _records(block)]


def _parse(line: str, where: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AlmaError(
            f"{where}: not JSON ({error}); each line must be one JSON object, or choose another --format"
        ) from error
    if not isinstance(record, dict):
        raise AlmaError(f"{where}: a JSON {type(record).__name__} found; each line must be one JSON object")
    return record


def _value(record: dict[str, object], field: str, flag: str, where: str) -> object:
    if field not in record:
        raise AlmaError(
            f"{where}: no field {field!r}, the fields are {', '.join(map(repr, record)) or 'none'}; name the field "
            f"that holds the {'text' if flag == '--field' else 'group'} with {flag}"
        )
    return record[field]


def _text_of(record: dict[str, object], block: Block, where: str) -> str:
    field, value = block.field, _value(record, block.field, "--field", where)
    if not isinstance(value, str):
        raise AlmaError(
            f"{where}: {field!r} is {value!r:.40}, it must be a text; mend the record or give another --field"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AlmaError(f"{where}: {field!r} holds half a surrogate pair, which is no text; mend the record") from error
    return value


_SPLITTERS: dict[str, Callable[[Block], list[str]]] = {
    "text": _paragraphs,
    "lines": _lines,
    "jsonl": _texts,
    "parquet": _texts,
    "arrow": _texts,
}
