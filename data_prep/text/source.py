"""The inputs of a command: files, folders, folders of ``datasets``, pipes and standard input."""

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.compression import strip_compression_suffix
from data_prep.text.documents import BLOCK_SIZE, Source
from fairseq_alma.errors import AlmaError, naming
from fairseq_alma.terminal import print_line

STANDARD_INPUT = "-"
_FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of a data set, and of several, as datasets' save_to_disk writes
_META = (_STATE, _SPLITS, "dataset_info.json")
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|dev)(?=[-_.])")
_ABOUT_DATA = re.compile(
    r"(readme|license|licence|copying|notice|citation|changelog|dataset_infos?|dataset_card|checksums?|sha256sums?)"
    r"([._-][a-z0-9_-]*)?(\.(md|txt|rst|json|cff|bib))?",
    re.IGNORECASE,
)


def find_sources(
    inputs: Sequence[str],
    form: Optional[str],
    field: str,
    folder: Optional[Path],
    out: Optional[Path] = None,
    by: Optional[str] = None,
    period: Optional[str] = None,
) -> list[Source]:
    """Return every file that the inputs mean: folders recursively, in the order of their names.

    Standard input and pipes are copied to files first, because every input is read more than once.

    Args:
        inputs: files, folders, pipes (``<(zcat a.gz)``, ``/dev/stdin``), or ``-``.
        form: form of the documents in all of them; None to decide by each file's name and content.
        field: field or column that holds the text.
        folder: where the copies go; None: a pipe is refused, as several machines read the input.
        out: where the stream is or will be: left out of a folder that contains it.
        by: see `Source`.
        period: see `Source`.

    Raises:
        AlmaError: an input does not exist or cannot be read, or a folder holds no file or an unreadable one.
    """
    left_out = None if out is None else out.resolve()
    for given in inputs:
        path = Path(given).resolve()
        if left_out in (path, *path.parents):
            raise AlmaError(f"--out {out}: holds the input {given}; choose a folder outside the input")
    found = [None if given == STANDARD_INPUT else _files_of(Path(given), left_out) for given in inputs]
    sources = []  # what cannot be read was refused above, before a pipe is waited for
    for argument, (given, files) in enumerate(zip(inputs, found, strict=True)):
        is_copy, label = files is None, "standard input" if given == STANDARD_INPUT else given
        if files is None:
            if folder is None:
                raise AlmaError(f"{label}: a pipe cannot be read by several machines; write it to a file first")
            files = [_copied(given, folder / f"input-{argument}")]
        for path in files:
            name = label if is_copy else str(path)
            sources.append(Source(path, name, argument, form or _form_of(path), field, is_copy, by, period))
    return sources


def _copied(given: str, path: Path) -> Path:
    """Copy what comes through standard input or a pipe to a file and return it."""
    with naming(path), open(path, "wb") as file:
        if given == STANDARD_INPUT:
            shutil.copyfileobj(sys.stdin.buffer, file, BLOCK_SIZE)
        else:
            with open(given, "rb") as pipe:
                shutil.copyfileobj(pipe, file, BLOCK_SIZE)
    return path


def _files_of(given: Path, left_out: Optional[Path]) -> Optional[list[Path]]:
    """Return the files that an input means; None: it is a pipe."""
    try:
        mode = given.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AlmaError(
            f"{given}: no such file or folder; give the text to prepare, or - for standard input"
        ) from error
    if stat.S_ISDIR(mode):
        return _files_in(given, left_out)
    if stat.S_ISFIFO(mode):
        return None
    if not stat.S_ISREG(mode):
        raise AlmaError(f"{given}: a device or a socket; give a file, a folder, a pipe, or - for standard input")
    return [given]


def _files_in(folder: Path, left_out: Optional[Path]) -> list[Path]:
    """Return the files in a folder and its subfolders in the order of their names, and print what is left out."""

    def refuse(error: OSError) -> None:  # instead of leaving a folder out
        raise error

    files: list[Path] = []
    skipped: list[str] = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        if _SPLITS in names:
            _refuse_mixture(Path(root), [str(each) for each in _json(Path(root, _SPLITS)).get("splits") or ()])
        folders[:] = [name for name in folders if not name.startswith(".") and Path(root, name).resolve() != left_out]
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                print_line(f"note: {Path(root, name)}: a link to a folder, which is not followed", sys.stderr)
        if _STATE in names:
            kept = _data_files(Path(root))
        else:
            visible = [name for name in names if not name.startswith(".") and name not in _META]
            kept = [name for name in visible if not _ABOUT_DATA.fullmatch(name)] or visible  # README alone is meant
            _refuse_mixture(Path(root), [match[0] for name in sorted(kept) if (match := _SPLIT_NAME.match(name))])
        left = {name for name in names if not name.startswith(".")} - {*kept, *_META}
        skipped += [str(Path(root, name)) for name in sorted(left)]
        files += [Path(root, name) for name in kept]
    for path in files:
        if not path.is_file():
            raise AlmaError(f"{path}: no regular file, or a link to none; remove it, or name the files that hold text")
    if not files:
        raise AlmaError(f"{folder}: no file in this folder; give a folder that holds the text")
    if skipped:
        shown = ", ".join(skipped[:5]) + (", …" if len(skipped) > 5 else "")
        print_line(f"note: {folder}: {len(files):,} files taken, {len(skipped):,} left out ({shown})", sys.stderr)
    return sorted(files)


def _refuse_mixture(folder: Path, splits: Sequence[str]) -> None:
    """Raise AlmaError if a folder holds several splits of a data set."""
    distinct = list(dict.fromkeys(splits))
    if len(distinct) > 1:
        raise AlmaError(
            f"{folder}: holds the splits {', '.join(distinct)} of a data set, which are not mixed; name the folder or "
            f"the files of those that you want ({folder / distinct[0]}…)"
        )


def _data_files(folder: Path) -> list[str]:
    """Return the names of a data set's files, of which ``state.json`` has a list; others are caches of ``map``."""
    listed = _json(folder / _STATE).get("_data_files")
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    names = [str(each.get("filename")) for each in entries]
    if not names or not all(Path(name).name == name for name in names):
        raise AlmaError(f"{folder / _STATE}: names no data files; save the data set again (save_to_disk)")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise AlmaError(f"{path}: not JSON ({error}); save the data set again (save_to_disk)") from error
    return content if isinstance(content, dict) else {}


def _form_of(path: Path) -> str:
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    return _FORMS.get(Path(strip_compression_suffix(path.name)).suffix, "text")
