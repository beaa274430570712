"""Fetch a published file and hold it against its checksum.

Ours rather than pooch: that replaces a file at hand whose checksum differs (the user's own ``--archive``, for one) by a
new download, makes what it fetches readable for its owner alone, and knows neither a checksum of unpacked content
(MNIST) nor one of many files together (Wikipedia).
"""

import hashlib
import http.client
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import IO, Iterable, Union

from data_prep.compression import open_plain_or_gz
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.terminal import tell

_TIMEOUT_SECONDS = 60


def fetch(url: str, path: Path) -> Path:
    """Return ``path``, fetched from ``url`` unless it is there; it appears only when it is complete.

    Raises:
        AlmaError: the address does not answer.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    tell(f"fetching {url}", sys.stderr)
    try:
        answer = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        raise _cannot_fetch(url, error) from error
    with answer, open_atomically(path) as file:
        while piece := _read(answer, url):
            file.write(piece)
    return path


def _read(answer: IO[bytes], url: str) -> bytes:
    try:
        return answer.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise _cannot_fetch(url, error) from error


def _cannot_fetch(url: str, error: Exception) -> AlmaError:
    return AlmaError(f"{url}: cannot be fetched ({error}); fetch it by other means and name the file")


def fetch_missing(url: str, name: str, folder: Path) -> Path:
    """Return the file of this name in a folder, plain or as ``.gz``, which is fetched if neither is there.

    Args:
        url: where the ``.gz`` is; ``{name}`` in it stands for the file's name.
        name: without ``.gz``.
        folder: made if it is not there.
    """
    plain = folder / name
    packed = f"{name}.gz"
    return plain if plain.exists() else fetch(url.format(name=packed), folder / packed)


def check_sha256(paths: Iterable[Path], expected: str, label: str, unpacked: bool = False) -> None:
    """Raise AlmaError unless the files, one after the other, have this sha256.

    Args:
        paths: the files.
        expected: sha256 in hexadecimal.
        label: what to call them.
        unpacked: it is the sha256 of what a .gz file unpacks to, so that however it was packed does not matter.
    """
    digest = hashlib.sha256()
    for path in paths:
        with open_plain_or_gz(path) if unpacked else open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    if digest.hexdigest() != expected:
        raise AlmaError(
            f"{label}: sha256 {digest.hexdigest()} found, the published content has {expected}; remove it and fetch it "
            "again"
        )


def unpack(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write some members of a zip or tar archive into a folder, each under its own name without the archive's folders.

    A member that is there already is left alone; one appears only when it is complete.

    Raises:
        AlmaError: it is no such archive, or a member is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _open_archive(archive) as opened:
            for member in members:
                path = folder / Path(member).name
                if path.exists():
                    continue
                with _open_member(opened, member) as content, open_atomically(path) as file:
                    shutil.copyfileobj(content, file)
    except (zipfile.BadZipFile, tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise AlmaError(f"{archive}: damaged, or not the published archive ({error}); fetch it again") from error


def _open_archive(archive: Path) -> Union[zipfile.ZipFile, tarfile.TarFile]:
    return zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive)


def _open_member(archive: Union[zipfile.ZipFile, tarfile.TarFile], member: str) -> IO[bytes]:
    if isinstance(archive, zipfile.ZipFile):
        return archive.open(member)
    content = archive.extractfile(member)
    if content is None:
        raise KeyError(f"{member} is no file")
    return content
