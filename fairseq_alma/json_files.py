"""Small JSON files: written whole or not at all, and held against a declared type where they are read.

Records are declared as types (``data/manifest.py``, ``runs/records.py``) whose ranges msgspec checks. It does not parse
them: Python's parser also takes the ``NaN`` and ``Infinity`` that a model which diverged has left in a record.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Mapping, TypeVar, Union

import msgspec
from msgspec import Meta

from fairseq_alma.atomic_file import open_atomically
from fairseq_alma.errors import AlmaError

LARGEST = 1 << 28  # bytes; a manifest of 10,000 mega-batches from 65,535 files takes a tenth of it
MAX_MEGABATCHES = 10_000

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Union[Count, Annotated[float, Meta(ge=0, le=1.7e308)]]
"""A finite number of at least 0; whole ones stay whole, as fingerprints are over the spelling."""
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
NumMegabatches = Annotated[int, Meta(ge=1, le=MAX_MEGABATCHES)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

Record = TypeVar("Record")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def write_json_atomically(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a file that is either there whole or not at all, also after a crash of the machine if it is ``durable``."""
    with open_atomically(path, "w", durable) as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, or raise AlmaError that ends with ``remedy``."""
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise AlmaError(f"{path}: damaged, more than {LARGEST >> 20} MiB found; {remedy}")
    try:
        text = content.decode()
        parsed = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()  # half a pair is no text, and cannot be shown
    except RecursionError as error:
        raise AlmaError(f"{path}: damaged, not JSON that can be read (nested too deeply); {remedy}") from error
    except ValueError as error:
        raise AlmaError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(parsed, dict):
        raise AlmaError(f"{path}: damaged, a {type(parsed).__name__} found where a JSON object is needed; {remedy}")
    return parsed


def as_record(content: Mapping[str, Any], kind: type[Record], path: Path, remedy: str) -> Record:
    """Return a JSON object as the record that its type declares; keys that the type does not have are left out.

    Args:
        content: what `read_json_object` returns.
        kind: a ``msgspec.Struct`` or a dataclass.
        path: where it was read, for messages.
        remedy: what to do if it is no such record.

    Raises:
        AlmaError: a key is missing, or a value of another type or range; says where in the record.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise AlmaError(f"{path}: damaged, {_fault(error, content, kind)}; {remedy}") from error


def _fault(error: msgspec.ValidationError, content: Mapping[str, Any], kind: type) -> str:
    """Say where in a record the fault is, what was found there and what is needed."""
    lacking = [name for name in _required(kind) if name not in content]
    if lacking:
        return f"no {', '.join(lacking)} in it"
    message, _, where = str(error).partition(" - at `")
    where = where.rstrip("`") or "$"
    if missing := re.fullmatch("Object missing required field `(.*)`", message):
        return f"no {missing[1]} in {where}"
    if needed := re.fullmatch("Expected (.+?)(?:, got .*)?", message):
        return f"{where} is {_shown(content, where)}, {needed[1].replace('`', '')} is needed"
    return f"{where}: {message}"


def _required(kind: type) -> list[str]:
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return [field.encode_name for field in fields if field.required]


def _shown(content: Any, where: str) -> str:
    """Return the value at a place such as ``$.valid.loss`` or ``$.splits[3].name``, cut short."""
    for key in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", where):
        try:
            content = content[key[0]] if key[0] else content[int(key[1])]
        except (LookupError, TypeError, ValueError):
            return "something else"
    if isinstance(content, (list, dict)):
        return f"a {type(content).__name__} of {len(content)}"
    text = repr(content) if not isinstance(content, int) or abs(content) < 10**30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}…"
