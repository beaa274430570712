"""The inputs of a command: files, folders, pipes, addresses and standard input."""

import os
import re
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Optional, Sequence, Union

from data_prep.compression import open_raw, reading, store_of, strip_compression_suffix
from data_prep.text.pieces import BLOCK_SIZE, Group, Source
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.terminal import tell

STANDARD_INPUT = "-"
SPOOLED = "standard-input"  # name of the file that stands for it
PIPE_PATIENCE_SECONDS = 10.0

_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside the data of datasets' save_to_disk
_LOCAL = ("file", "local")
# Those of fsspec that stand for files, also within an archive (zip://a.txt::s3://…) or kept in a cache.
_SCHEMES = (
    *("s3", "gs", "gcs", "hf", "http", "https", "ftp", "sftp", "ssh", "smb", "abfs", "az", "adl", "hdfs", "webhdfs"),
    *("webdav", "oci", "oss", "box", "dropbox", "gdrive", "git", "github", *_LOCAL, "memory", "zip", "tar"),
    *("simplecache", "filecache"),
)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
_SHARE = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", re.ASCII)


def find_sources(
    inputs: Sequence[str],
    form: Optional[str],
    field: str,
    folder: Optional[Path],
    out: Optional[Path] = None,
    group: Optional[Group] = None,
) -> list[Source]:
    """Return every file that the inputs mean: folders recursively, in the order of their names.

    Standard input and pipes are copied to files first, because every input is read more than once.

    Args:
        inputs: files, folders, pipes (``<(zcat a.gz)``, ``/dev/stdin``), addresses that fsspec reads, of files
            (``s3://…``), of several (``s3://…/*.jsonl``) or of folders (``s3://…/``), or ``-``; with a share of
            the documents behind it: ``a.txt=0.3``.
        form: how documents stand in all of them; None to go by each file's name and content.
        field: where the text is in a record.
        folder: where the copies go; None: there are none, as several machines read the input.
        out: where the stream will be, or is: no part of a folder that it lies in.
        group: what puts documents into groups, if anything.

    Raises:
        AlmaError: an input does not exist or cannot be read, or a folder holds no file, or something that is none.
    """
    shares = [share_of(given) for given in inputs]
    inputs = [given for given, _ in shares]
    # What cannot be read shows before a pipe is waited for.
    left_out = None if out is None else out.resolve()
    found = [
        None if given == STANDARD_INPUT or _REMOTE.match(given) else _files_of(Path(given), left_out)
        for given in inputs
    ]
    sources = []
    for argument, (given, files) in enumerate(zip(inputs, found, strict=True)):
        if _REMOTE.match(given):
            for number, address in enumerate(_addresses(given)):
                if folder is None:
                    sources.append(Source(address, address, argument, form or _form_of(address), field, group=group))
                    continue
                # The name says how it is compressed, and what is in it.
                copy = folder / f"remote-{argument}-{number}-{Path(address).name}"
                _fetch(address, copy)
                sources.append(Source(copy, address, argument, form or _form_of(copy), field, True, group))
        elif files is None:
            if folder is None:
                raise AlmaError(f"{given}: a pipe cannot be read by several machines; write it to a file first")
            copy = _spool(given, folder / (SPOOLED if given == STANDARD_INPUT else f"pipe-{argument}"))
            label = "standard input" if given == STANDARD_INPUT else given
            sources.append(Source(copy, label, argument, form or _form_of(copy), field, True, group))
        else:
            sources += [Source(path, str(path), argument, form or _form_of(path), field, group=group) for path in files]
    return [replace(source, share=shares[source.argument][1]) for source in sources]


def is_address(given: str) -> bool:
    """Tell whether it is an address for fsspec, no path."""
    return _REMOTE.match(given) is not None


def share_of(given: str) -> tuple[str, float]:
    """Return an input, and the share of its documents that is asked for: ``a.txt=0.3`` is 0.3 of ``a.txt``.

    Raises:
        AlmaError: the share is no number above 0 and at most 1.
    """
    name, _, number = given.rpartition("=")
    is_number = _SHARE.fullmatch(number) is not None
    if not name or os.path.lexists(given) or not (is_number or os.path.lexists(name)):
        return given, 1.0
    share = float(number) if is_number else 0.0
    if not 0 < share <= 1:
        raise AlmaError(f"INPUT {given}: a share above 0 and at most 1 is needed behind =, as in {name}=0.3")
    return name, share


def _spool(given: str, path: Path) -> Path:
    """Copy what comes through standard input or a pipe to a file and return it."""
    if given != STANDARD_INPUT:
        with _open_pipe(given) as pipe, naming(path), open(path, "wb") as file:
            shutil.copyfileobj(pipe, file, BLOCK_SIZE)
    elif sys.stdin is None:
        raise AlmaError("INPUT -: standard input is closed; give a file, or pipe the text into the command")
    else:
        with naming(path), open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, BLOCK_SIZE)
    return path


def _addresses(given: str) -> list[str]:
    """Return the addresses of the files that one with a ``*`` or a ``/`` at its end stands for, in their order."""
    for scheme in (link.partition("://")[0] for link in given.split("::") if "://" in link):
        if scheme not in _SCHEMES:
            raise AlmaError(f"{given}: no file is read from {scheme}://; give one of {', '.join(_SCHEMES)}")
    if "::" in given or not (given.endswith("/") or "*" in given):
        return [given]
    with reading(given):
        store, path = store_of(given)
        paths = store.glob(path) if "*" in given else store.find(path)
        names = [each for each in sorted(paths) if not each.rpartition("/")[2].startswith(".") and store.isfile(each)]
        if not names:
            raise FileNotFoundError("no file is there")
        return [store.unstrip_protocol(name) for name in names]


def _fetch(given: str, path: Path) -> None:
    """Copy a remote file, by whatever fsspec can read here. Raises AlmaError if it cannot."""
    import fsspec

    scheme, _, last = given.split("::")[-1].rpartition("://")
    if scheme in ("", *_LOCAL) and Path(last).exists() and not Path(last).is_file():
        raise AlmaError(f"{given}: a folder, a pipe or a device; give the address of a file")
    with reading(given, path), fsspec.open(given, "rb") as remote, naming(path), open(path, "wb") as file:
        shutil.copyfileobj(remote, file, BLOCK_SIZE)


def _open_pipe(given: str) -> IO[bytes]:
    """Open a pipe, which takes until somebody opens it for writing. Raises AlmaError if nobody does."""
    opened: Queue = Queue()

    def wait() -> None:
        try:
            opened.put(open(given, "rb"))  # noqa: SIM115  whoever gets it closes it
        except OSError as error:
            opened.put(error)

    Thread(target=wait, daemon=True).start()
    try:
        pipe = opened.get(timeout=PIPE_PATIENCE_SECONDS)
    except Empty:
        raise AlmaError(
            f"{given}: a pipe that nobody has opened for writing in {PIPE_PATIENCE_SECONDS:g} seconds; start what "
            "writes to it first, or give a file"
        ) from None
    if isinstance(pipe, OSError):
        raise pipe
    return pipe


def _files_of(given: Path, left_out: Optional[Path]) -> Optional[list[Path]]:
    """Return the files that an input means; None: it is a pipe."""
    try:
        mode = given.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AlmaError(
            f"{given}: no such file or folder; give the text to prepare, or - for standard input"
        ) from error
    except PermissionError as error:
        raise _unreadable(given) from error
    if stat.S_ISDIR(mode):
        return _files_in(given, left_out)
    if stat.S_ISFIFO(mode):
        return None
    if not stat.S_ISREG(mode):
        raise AlmaError(f"{given}: a device or a socket; give a file, a folder, a pipe, or - for standard input")
    return [given]


def _files_in(folder: Path, left_out: Optional[Path]) -> list[Path]:
    """Return the files in a folder and the folders in it, but one and hidden ones, in the order of their names."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename)) from error

    files = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(root, name).resolve() != left_out]
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                tell(f"note: {Path(root, name)}: a link to a folder, which is not followed", sys.stderr)
        if any(name in _OF_DATASETS for name in names):
            names = [name for name in names if name not in _OF_DATASETS]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    for path in files:
        if not path.is_file():
            raise AlmaError(f"{path}: no regular file, or a link to none; remove it, or name the files that hold text")
    if not files:
        raise AlmaError(f"{folder}: no file in this folder; give a folder that holds the text")
    return sorted(files)


def _form_of(path: Union[Path, str]) -> str:
    known = _FORMS.get(Path(strip_compression_suffix(Path(path).name)).suffix)
    if known is not None and isinstance(path, str):
        return known  # without a request for each of thousands
    try:
        with open_raw(path) as file:
            if file.read(4) == b"PAR1":
                return "parquet"
    except PermissionError as error:
        raise _unreadable(Path(path)) from error
    return known or "text"


def _unreadable(path: Path) -> AlmaError:
    return AlmaError(f"{path}: permission denied; make it readable (chmod), or leave it out")
