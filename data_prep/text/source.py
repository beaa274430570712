"""The inputs of a command: files, folders, pipes and standard input."""

import os
import shutil
import stat
import sys
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Optional, Sequence

from data_prep.compression import strip_compression_suffix
from data_prep.text.pieces import BLOCK_SIZE, Group, Source
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.terminal import tell

STANDARD_INPUT = "-"
SPOOLED = "standard-input"  # name of the file that stands for it
PIPE_PATIENCE_SECONDS = 10.0

_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside the data of datasets' save_to_disk


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
        inputs: files, folders, pipes (``<(zcat a.gz)``, ``/dev/stdin``), or ``-``.
        form: how documents stand in all of them; None to go by each file's name and content.
        field: where the text is in a record.
        folder: where the copies go; None: there are none, as several machines read the input.
        out: where the stream will be, or is: no part of a folder that it lies in.
        group: what puts documents into groups, if anything.

    Raises:
        AlmaError: an input does not exist or cannot be read, or a folder holds no file, or something that is none.
    """
    # What cannot be read shows before a pipe is waited for.
    left_out = None if out is None else out.resolve()
    found = [None if given == STANDARD_INPUT else _files_of(Path(given), left_out) for given in inputs]
    sources = []
    for argument, (given, files) in enumerate(zip(inputs, found, strict=True)):
        if files is None:
            if folder is None:
                raise AlmaError(f"{given}: a pipe cannot be read by several machines; write it to a file first")
            copy = _spool(given, folder / (SPOOLED if given == STANDARD_INPUT else f"pipe-{argument}"))
            label = "standard input" if given == STANDARD_INPUT else given
            sources.append(Source(copy, label, argument, form or _form_of(copy), field, True, group))
        else:
            sources += [Source(path, str(path), argument, form or _form_of(path), field, group=group) for path in files]
    return sources


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


def _form_of(path: Path) -> str:
    known = _FORMS.get(Path(strip_compression_suffix(path.name)).suffix)
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"PAR1":
                return "parquet"
    except PermissionError as error:
        raise _unreadable(path) from error
    return known or "text"


def _unreadable(path: Path) -> AlmaError:
    return AlmaError(f"{path}: permission denied; make it readable (chmod), or leave it out")
