"""Fetch a published file and hold it against its checksum."""

import hashlib
import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Iterable

from fairseq_alma.data.file_errors import naming
from fairseq_alma.errors import AlmaError

_TIMEOUT_SECONDS = 60


def fetch(url: str, path: Path) -> Path:
    """Return ``path``, fetched from ``url`` unless it is there; it appears only when it is complete.

    Raises:
        AlmaError: the address does not answer.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    print(f"fetching {url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer, naming(part), open(part, "wb") as file:
            shutil.copyfileobj(answer, file)
    except (urllib.error.URLError, TimeoutError) as error:
        raise AlmaError(f"{url}: cannot be fetched ({error}); fetch it by other means and name the file") from error
    os.replace(part, path)
    return path


def check_sha256(paths: Iterable[Path], expected: str, label: str) -> None:
    """Raise AlmaError unless the files, one after the other, have this sha256."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    if digest.hexdigest() != expected:
        raise AlmaError(
            f"{label}: sha256 {digest.hexdigest()} found, the published content has {expected}; remove it and fetch it "
            "again"
        )
