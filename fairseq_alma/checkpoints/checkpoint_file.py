"""Checkpoint files, fairseq's or ours: every command reads them here, and writes them here. No fairseq.

Nothing in a file is run: torch reads tensors and plain data alone, and only known models are built (`architecture`).
The archive's checksums are compared, so that a truncated or damaged file is refused in one line.
"""

import errno
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Union

import torch
from torch import Tensor

from fairseq_alma.checkpoints import AVERAGE, IMAGE_TASK_STATE, TASK_STATE, UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import check_config
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import file_identity, once_per_file, open_atomically

Checkpoint = dict[str, Any]

DICTIONARY_KEY = "alma_dictionary_sha256"
"""Key in a checkpoint's ``task_state``: identifies the vocabulary that the model was trained with."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_REMEDY = "give a checkpoint that fairseq-train or alma-grow wrote"
_NUM_READINGS = 10  # of a file that others replace meanwhile


def read_checkpoint(
    path: Union[str, Path], mmap: bool = True, remedy: str = _REMEDY, needed: Collection[str] = ()
) -> Checkpoint:
    """Load a checkpoint on the CPU.

    Args:
        path: the file.
        mmap: leave tensors on disk until they are used; then they take memory only once they are.
        remedy: what to do if it cannot be read, for messages.
        needed: further keys that it must have.

    Returns:
        The dictionary that fairseq saved: ``cfg``, ``model``, ``extra_state`` and so on.

    Raises:
        AlmaError: if the file is missing, truncated, damaged, or no checkpoint of a model that is built here.
    """
    path = Path(path)
    if not path.is_file():
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}")
    try:
        checkpoint = load_archive(path, mmap)
        _check_content(checkpoint)
        if lacking := [name for name in needed if checkpoint.get(name) is None]:
            raise UnfitCheckpoint(f"no checkpoint that fairseq-train wrote, it lacks {', '.join(lacking)}")
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _check_content(checkpoint: Any) -> None:
    config = checkpoint.get("cfg") if isinstance(checkpoint, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict) or "model" not in checkpoint:
        raise UnfitCheckpoint("no checkpoint of fairseq, it lacks 'model' or 'cfg'")
    if checkpoint.get("args") is not None:
        raise UnfitCheckpoint("options under 'args', as checkpoints of 2020 and before have them, are not read here")
    weights = checkpoint["model"]
    if not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise UnfitCheckpoint("damaged, its model is no dictionary of weights")
    if wrong := [name for name, each in weights.items() if each.dtype not in FLOATS]:
        raise UnfitCheckpoint(f"{wrong[0]} is {weights[wrong[0]].dtype}, a weight is a floating-point number")
    try:
        check_config(config["model"])
    except (TypeError, KeyError, AttributeError) as error:
        raise UnfitCheckpoint("damaged, the members in its configuration cannot be read") from error


def load_archive(path: Path, mmap: bool) -> Any:
    """Load what torch has saved, tensors and plain data alone, on the CPU.

    torch opens the file twice, for the pickle and for the tensors. Meanwhile another process may put one in its place,
    as a run does that takes the optimizer's state out of the checkpoints of a stage that is complete: it is read again.

    Args:
        path: a regular file.
        mmap: leave tensors on disk until they are used.

    Raises:
        UnfitCheckpoint: it is truncated or damaged, or holds other things than tensors and plain data.
    """
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
    _check_archive(path)
    try:
        # fairseq keeps the options of AdaDelta and SGD in its checkpoints as a Namespace.
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # torch's own text advises to run whatever the file holds
        raise UnfitCheckpoint("cannot be loaded: damaged, or it holds more than weights and plain data") from error


@once_per_file
def _check_archive(path: Path) -> None:
    """Compare every part of the archive with its checksum, which torch does not."""
    if not zipfile.is_zipfile(path):
        raise UnfitCheckpoint(f"no checkpoint, or a truncated one ({path.stat().st_size:,} bytes, not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # of many kinds: BadZipFile, NotImplementedError, RuntimeError, struct.error, …
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place before the file's beginning
            raise
        raise UnfitCheckpoint(f"damaged or truncated, its directory cannot be read ({error})") from error
    if damaged is not None:
        raise UnfitCheckpoint(f"damaged, {damaged!r} in it does not have the checksum that was written with it")


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


def write_checkpoint(checkpoint: Checkpoint, path: Union[str, Path]) -> None:
    """Save a checkpoint so that it appears under its name only when it is complete.

    Args:
        checkpoint: what `read_checkpoint` returns.
        path: the file.
    """
    with open_atomically(Path(path)) as file:
        torch.save(checkpoint, file)


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the part of ``extra_state`` that has an average; None: there is none."""
    entries = (checkpoint.get("extra_state", {}).get(key) for key in (TASK_STATE, IMAGE_TASK_STATE))
    return next((each for each in entries if isinstance(each, dict) and isinstance(each.get(AVERAGE), dict)), None)


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the average under all names of ``model``; what was not averaged, as buffers, is the model's own."""
    by_place = {_place(model[name]): tensor for name, tensor in average.items() if name in model}
    return {name: average.get(name, by_place.get(_place(tensor), tensor)) for name, tensor in model.items()}


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
