"""Small JSON files that are there whole or not at all."""

import json
from pathlib import Path
from typing import Any, Mapping

from fairseq_alma.atomic_file import open_atomically
from fairseq_alma.errors import AlmaError


def write_json_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is either there whole or not at all, also after a crash of the machine."""
    with open_atomically(path, "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, or raise AlmaError that ends with ``remedy``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AlmaError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise AlmaError(f"{path}: damaged, a {type(content).__name__} found where a JSON object is needed; {remedy}")
    return content
