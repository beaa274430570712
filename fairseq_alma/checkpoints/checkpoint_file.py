"""Read and write checkpoint files of fairseq and of this package. No fairseq imports.

Loading a checkpoint runs no code from the file: torch loads only tensors and plain data, and `architecture` allows only
known models. `read_checkpoint` verifies the checksums of the archive and rejects truncated or damaged files.
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
from fairseq_alma.files import once_per_file, open_atomically

Checkpoint = dict[str, Any]

DICTIONARY_KEY = "alma_dictionary_sha256"
"""Key of ``task_state`` for the sha256 of the training vocabulary (``dict.txt``)."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_REMEDY = "give a checkpoint written by fairseq-train or alma-grow"


def read_checkpoint(
    path: Union[str, Path], mmap: bool = True, remedy: str = _REMEDY, needed: Collection[str] = ()
) -> Checkpoint:
    """Load a checkpoint on the CPU.

    Args:
        path: checkpoint file.
        mmap: memory-map the file; torch then reads a tensor from disk only when the tensor is used.
        remedy: next step for the user, appended to error messages.
        needed: required keys in addition to ``cfg`` and ``model``.

    Returns:
        The dictionary saved by fairseq, with keys such as ``cfg``, ``model`` and ``extra_state``.

    Raises:
        AlmaError: the file is missing, truncated, damaged, or not a checkpoint of a supported model.
    """
    path = Path(path)
    if not path.is_file():
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}")
    try:
        checkpoint = load_archive(path, mmap)
        _check_content(checkpoint)
        if missing := [name for name in needed if checkpoint.get(name) is None]:
            raise UnfitCheckpoint(f"not a checkpoint written by fairseq-train (lacks {', '.join(missing)})")
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _check_content(checkpoint: Any) -> None:
    config = checkpoint.get("cfg") if isinstance(checkpoint, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict) or "model" not in checkpoint:
        raise UnfitCheckpoint("not a checkpoint of fairseq (lacks 'model' or 'cfg')")
    if checkpoint.get("args") is not None:
        raise UnfitCheckpoint("options in 'args' (checkpoint format of fairseq until 2020) are not supported")
    weights = checkpoint["model"]
    if not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise UnfitCheckpoint("damaged: 'model' is not a dictionary of weights")
    if wrong := [name for name, each in weights.items() if each.dtype not in FLOATS]:
        raise UnfitCheckpoint(f"expected floating-point weights, found {wrong[0]} of type {weights[wrong[0]].dtype}")
    try:
        check_config(config["model"])
    except (TypeError, KeyError, AttributeError) as error:
        raise UnfitCheckpoint("damaged: the ensemble members in 'cfg' are invalid") from error


def load_archive(path: Path, mmap: bool) -> Any:
    """Load a file written by ``torch.save``, with tensors on the CPU. For the arguments, see `read_checkpoint`.

    Raises:
        UnfitCheckpoint: the file is damaged, or contains objects other than tensors and plain data.
    """
    _check_archive(path)
    with open(path, "rb") as file:
        try:
            # fairseq saves the options of some optimizers as a Namespace. torch opens the path twice; the path of the
            # file descriptor refers to the same file, even if another process replaces the checkpoint in between.
            with torch.serialization.safe_globals([Namespace]):
                opened = f"/proc/self/fd/{file.fileno()}"
                return torch.load(opened, map_location="cpu", weights_only=True, mmap=mmap)
        except OSError:
            raise
        except Exception as error:  # do not show torch's message: it advises unsafe loading
            raise UnfitCheckpoint("damaged, or contains objects other than weights and plain data") from error


@once_per_file
def _check_archive(path: Path) -> None:
    """Verify the checksum of each archive entry; ``torch.load`` does not verify checksums."""
    if not zipfile.is_zipfile(path):
        raise UnfitCheckpoint(f"not a checkpoint, or truncated ({path.stat().st_size:,} bytes, not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # BadZipFile, NotImplementedError, RuntimeError, struct.error and others
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: negative offset in the file
            raise
        raise UnfitCheckpoint(f"damaged or truncated: cannot read the zip directory ({error})") from error
    if damaged is not None:
        raise UnfitCheckpoint(f"damaged: the checksum of {damaged!r} in the archive is wrong")


def untrained_checkpoint(cfg: Any, model: Mapping[str, Any], task_state: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with all keys that fairseq requires, but without optimizer state."""
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
    """Write a checkpoint to a temporary file, then rename this file to ``path``."""
    with open_atomically(Path(path)) as file:
        torch.save(checkpoint, file)


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the entry of ``extra_state`` that contains averaged weights, or None if there is no such entry."""
    entries = (checkpoint.get("extra_state", {}).get(key) for key in (TASK_STATE, IMAGE_TASK_STATE))
    return next((each for each in entries if isinstance(each, dict) and isinstance(each.get(AVERAGE), dict)), None)


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``model`` with parameters replaced by averaged weights; buffers do not change.

    ``average`` has one name for each parameter. A shared parameter has several names in ``model``; the averaged weight
    replaces the parameter under each name.
    """
    shared = {(model[name].data_ptr(), model[name].numel()): each for name, each in average.items() if name in model}
    weights = {name: shared.get((each.data_ptr(), each.numel()), each) for name, each in model.items()}
    return weights | {name: each for name, each in average.items() if name in model}
