"""Find the input files of ``alma-prep-text``: files, folders, pipes and standard input."""

import os
import re
import shutil
import stat
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Optional, Sequence

from data_prep.compression import COMPRESSION_SUFFIXES
from data_prep.text.documents import BLOCK_SIZE, Source
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.terminal import print_line

STANDARD_INPUT = "-"
_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|dev)(?=[-_.])")
_ABOUT_DATA = re.compile(
    r"(readme|license|licence|copying|notice|citation|changelog|dataset_infos?|dataset_card|checksums?|sha256sums?)"
    r"([._-][a-z0-9_-]*)?(\.(md|txt|rst|json|cff|bib))?",
    re.IGNORECASE,
)


def find_sources(
    inputs: Sequence[str],
    form: str,
    field: str,
    folder: Optional[Path],
    out: Optional[Path] = None,
    by: Optional[str] = None,
    period: Optional[str] = None,
) -> list[Source]:
    """Return all input files. The files of a folder and its subfolders are sorted by name.

    Copy standard input and pipes to files, because every input is read more than once.

    Args:
        inputs: files, folders, pipes (``<(zcat a.gz)``, ``/dev/stdin``), or ``-``.
        form: format of all files; ``auto`` to detect the format of each file by name and content.
        field: field or column with the text.
        folder: folder for copies of pipes; None if pipes are not allowed, because several machines read the input.
        out: folder of the stream, which is ignored within input folders.
        by: field or column with the group of a document, see `Source`.
        period: period of the dates in field ``by``, see `Source`.

    Raises:
        AlmaError: an input does not exist or cannot be read, or a folder has no files, special files or several splits.
    """
    stream = None if out is None else out.resolve()
    found: list[Optional[list[Path]]] = []  # None for a pipe. Pipes are read after all other checks.
    for given in inputs:
        path = Path(given)
        if stream in (path.resolve(), *path.resolve().parents):
            raise AlmaError(f"--out {out}: the folder contains the input {given}; choose another folder for the stream")
        if given != STANDARD_INPUT and not path.exists():
            raise AlmaError(f"{given}: expected a file or folder, found nothing; give a path, or - for standard input")
        mode = stat.S_IFIFO if given == STANDARD_INPUT else path.stat().st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            raise AlmaError(f"{given}: expected a file, folder or pipe, found a device or a socket; give another INPUT")
        found.append(None if stat.S_ISFIFO(mode) else _files_in(path, stream) if stat.S_ISDIR(mode) else [path])
    sources = []
    for argument, (given, files) in enumerate(zip(inputs, found, strict=True)):
        label = "standard input" if given == STANDARD_INPUT else given
        if is_pipe := files is None:
            if folder is None:
                raise AlmaError(f"{label}: several machines cannot read a pipe; write the text to a file first")
            files = [folder / f"input-{argument}"]
            with naming(files[0]), open(files[0], "wb") as file, ExitStack() as opened:
                is_standard = given == STANDARD_INPUT
                pipe = sys.stdin.buffer if is_standard else opened.enter_context(open(given, "rb"))
                shutil.copyfileobj(pipe, file, BLOCK_SIZE)
        for path in files:
            own_label, own_form = label if is_pipe else str(path), _form_of(path) if form == "auto" else form
            sources.append(Source(path, own_label, argument, own_form, field, is_pipe, by, period))
    return sources


def _files_in(folder: Path, stream: Optional[Path]) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted by name, and print which files are ignored."""

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
        # A README is text of the input if there is no other file.
        kept = [name for name in visible if not _ABOUT_DATA.fullmatch(name)] or visible
        splits = list(dict.fromkeys(match[0] for name in kept if (match := _SPLIT_NAME.match(name))))
        if len(splits) > 1:
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


def _form_of(path: Path) -> str:
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    name = path.stem if path.suffix in COMPRESSION_SUFFIXES else path.name
    return _FORMS.get(Path(name).suffix, "text")
