"""Checkpoint files, fairseq's or ours: every command reads them here, and writes them here. No fairseq.

The archive is whole and unaltered, what comes from it is never run and never evaluated, has the declared types and
bounded sizes (`contents`), and its weights are finite numbers in the shapes of the model (`architecture`); anything
else is refused in one line.
"""

import errno
import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Collection, Mapping, Union

import torch
from torch import UntypedStorage

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import check_model
from fairseq_alma.checkpoints.contents import check_contents, check_finite
from fairseq_alma.data.known_files import VERIFIED, file_identity
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically

LARGEST_PICKLE = 1 << 26
"""Bytes of everything but tensors; 500 steps of growth take a tenth. Python reads about 10 MB of it in a second."""
_NUM_READINGS = 10  # of a file that others replace meanwhile
_MORE_THAN_DATA = "damaged, or it holds more than weights and plain data"


def load_archive(path: Path, mmap: bool) -> Any:
    """Load what torch has saved on the CPU, without executing anything that a pickle could contain.

    Args:
        path: a regular file.
        mmap: leave tensors on disk until they are used.

    Raises:
        UnfitCheckpoint: it is truncated or damaged, or holds other things than tensors and plain data.
    """
    # torch opens the file twice, for what the pickle says and for the tensors. Meanwhile another process may put one in
    # its place, as a run does that takes the optimizer's state out of the checkpoints of a stage that is complete.
    for _ in range(_NUM_READINGS):
        before = file_identity(path)
        try:
            loaded = _load_archive(path, mmap)
        except UnfitCheckpoint:
            if file_identity(path) == before:
                raise
        else:
            if file_identity(path) == before:
                return loaded
    raise UnfitCheckpoint("is replaced again and again while it is being read")


def _load_archive(path: Path, mmap: bool) -> Any:
    if not VERIFIED.has(path):
        _check_archive(path)
    # fairseq keeps the options of AdaDelta and SGD in its checkpoints as a Namespace. Here, each time, because torch
    # forgets it for all where somebody allows it for a while.
    torch.serialization.add_safe_globals([Namespace])
    try:
        # Mapped in any case, as sizes that a pickle announces then end with the file.
        where: Any = "cpu" if mmap else _copied
        return torch.load(path, map_location=where, weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # torch's own text advises to run whatever the file holds
        raise UnfitCheckpoint(f"cannot be loaded as a checkpoint ({_MORE_THAN_DATA})") from error
    except Exception as error:  # of many kinds, as a damaged pickle calls what it likes of torch's few functions
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        reason = _MORE_THAN_DATA if "weights" in reason.lower() and "only" in reason else reason
        raise UnfitCheckpoint(f"cannot be loaded as a checkpoint ({reason})") from error


def _copied(storage: UntypedStorage, location: str) -> UntypedStorage:
    return storage.clone()


def _check_archive(path: Path) -> None:
    """Compare every file of the archive with its checksum."""
    size = os.path.getsize(path)
    if not zipfile.is_zipfile(path):
        raise UnfitCheckpoint(f"no checkpoint, or a truncated one ({size:,} bytes, not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive.infolist(), size)
            damaged = archive.testzip()
    except Exception as error:  # of many kinds: BadZipFile, NotImplementedError, RuntimeError, struct.error, …
        if isinstance(error, UnfitCheckpoint) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise  # EINVAL: a place before the file's beginning
        raise UnfitCheckpoint(f"damaged or truncated, its directory cannot be read ({error})") from error
    if damaged is not None:
        raise UnfitCheckpoint(f"damaged, {damaged!r} in it does not have the checksum that was written with it")


def _check_directory(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse what torch does not write, and what is larger than it says."""
    if len({entry.filename for entry in entries}) < len(entries):
        raise UnfitCheckpoint("damaged, its directory names a file twice")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise UnfitCheckpoint(f"no checkpoint, {entry.filename!r} in it is compressed")
        if entry.filename.endswith("data.pkl") and entry.file_size > LARGEST_PICKLE:
            raise UnfitCheckpoint(
                f"{entry.file_size:,} bytes beside its tensors, more than the {LARGEST_PICKLE:,} that can be read"
            )
    if sum(entry.file_size for entry in entries) > size:
        raise UnfitCheckpoint("damaged, the files in it overlap")


Checkpoint = dict[str, Any]

DICTIONARY_KEY = "alma_dictionary_sha256"
"""Key in a checkpoint's ``task_state``: identifies the vocabulary that the model was trained with."""

_REMEDY = "give a checkpoint that fairseq-train or alma-grow wrote"


def read_checkpoint(
    path: Union[str, Path], mmap: bool = True, remedy: str = _REMEDY, needed: Collection[str] = ()
) -> Checkpoint:
    """Load a checkpoint on the CPU, without executing anything that a pickle could contain.

    Its checksums and its weights are looked at once for each file and process.

    Args:
        path: the file.
        mmap: leave tensors on disk until they are used; then they take memory only once they are.
        remedy: what to do if it cannot be read, for messages.
        needed: further keys that it must have.

    Returns:
        The dictionary that fairseq saved: ``cfg``, ``model``, ``extra_state`` and so on.

    Raises:
        AlmaError: if the file is missing, truncated, damaged, altered, or no checkpoint of a model that is built here.
    """
    path = Path(path)
    if not path.is_file():
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}")
    try:
        checkpoint = load_archive(path, mmap)
        if not isinstance(checkpoint, dict) or "model" not in checkpoint or not _has_config(checkpoint):
            raise UnfitCheckpoint("no checkpoint of fairseq, it lacks 'model' or 'cfg'")
        check_contents(checkpoint, path.stat().st_size)
        check_model(checkpoint["cfg"]["model"], checkpoint["model"])
        if lacking := [name for name in needed if checkpoint.get(name) is None]:
            raise UnfitCheckpoint(f"no checkpoint that fairseq-train wrote, it lacks {', '.join(lacking)}")
        if not VERIFIED.has(path):
            check_finite(checkpoint)
            VERIFIED.add(path)
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _has_config(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("cfg"), dict) and isinstance(checkpoint["cfg"].get("model"), dict)


def untrained_checkpoint(cfg: Any, model: Mapping[str, Any], task_state: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of weights that no training of fairseq made, with what fairseq expects of every one."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {"best": None}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": dict(model),
        "criterion": None,
        "optimizer_history": [history],
        "task_state": dict(task_state),
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }


def write_checkpoint(checkpoint: Checkpoint, path: Union[str, Path], replace: bool = True) -> None:
    """Save a checkpoint so that it appears under its name only when it is complete.

    Args:
        checkpoint: what `read_checkpoint` returns.
        path: the file.
        replace: whether one that exists is replaced, or refused.
    """
    with open_atomically(Path(path), replace=replace) as file:
        torch.save(checkpoint, file)
