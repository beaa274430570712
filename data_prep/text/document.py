"""Blocks of input, and the documents in them.

The main process cuts the input into blocks of about one MiB without looking at documents; worker processes take a
block apart. Every pass cuts the same blocks, so a document is known by its place in the order of all documents.
"""

import json
import re
from dataclasses import dataclass
from typing import Callable, Sequence, Union

from fairseq_alma.errors import AlmaError

_BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Block:
    """A piece of one input that begins and ends between two documents.

    Attributes:
        label: how messages call the input.
        form: ``text`` (documents separated by an empty line), ``lines``, ``jsonl``, ``parquet`` or ``arrow``.
        field: field (``jsonl``) or column (``parquet``, ``arrow``) that holds the text.
        first_line: number of the first line (for ``parquet``: row) in the input, from 1.
        content: the bytes; for ``parquet`` the column's values.
    """

    label: str
    form: str
    field: str
    first_line: int
    content: Union[bytes, Sequence[object]]


def documents_of(block: Block) -> list[str]:
    """Return the documents of a block, without white space around them; what is empty then is no document.

    Raises:
        AlmaError: the block is no UTF-8 text, or a record lacks the field.
    """
    texts = _SPLITTERS[block.form](block)
    return [stripped for text in texts if (stripped := text.strip())]


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


def _json_lines(block: Block) -> list[str]:
    texts = []
    for number, line in enumerate(text_of(block).split("\n"), start=block.first_line):
        if line and not line.isspace():
            texts.append(_text_of_record(line, block.field, f"{block.label}, line {number}"))
    return texts


def _text_of_record(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AlmaError(
            f"{where}: not JSON ({error}); each line must be one JSON object, or choose another --format"
        ) from error
    if not isinstance(record, dict):
        raise AlmaError(f"{where}: a JSON {type(record).__name__} found; each line must be one JSON object")
    if field not in record:
        raise AlmaError(
            f"{where}: no field {field!r}, the fields are {', '.join(map(repr, record)) or 'none'}; name the field "
            "that holds the text with --field"
        )
    return _checked_text(record[field], field, where)


def _checked_text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise AlmaError(
            f"{where}: {field!r} is {value!r:.40}, it must be a text; mend the record or give another --field"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AlmaError(f"{where}: {field!r} holds half a surrogate pair, which is no text; mend the record") from error
    return value


def _rows(block: Block) -> list[str]:
    rows = enumerate(block.content, start=block.first_line)
    return [_checked_text(value, block.field, f"{block.label}, row {number}") for number, value in rows]


_SPLITTERS: dict[str, Callable[[Block], list[str]]] = {
    "text": _paragraphs,
    "lines": _lines,
    "jsonl": _json_lines,
    "parquet": _rows,
    "arrow": _rows,
}
