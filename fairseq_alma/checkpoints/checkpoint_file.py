"""Read and write checkpoint files, fairseq's or ours, with one line for a file that is none. No fairseq."""

import pickle
import zipfile
from pathlib import Path
from typing import Any, Mapping, Optional, Union

import torch

from fairseq_alma.atomic_file import open_atomically
from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import AlmaError

Checkpoint = dict[str, Any]

DICTIONARY_KEY = "alma_dictionary_sha256"
"""Key in a checkpoint's ``task_state``: identifies the vocabulary that the model was trained with."""

_REMEDY = "give a checkpoint that fairseq-train or alma-grow wrote"


def read_checkpoint(path: Union[str, Path], mmap: bool = True, remedy: str = _REMEDY) -> Checkpoint:
    """Load a checkpoint on the CPU, without executing anything that a pickle could contain.

    Args:
        path: the file.
        mmap: leave tensors on disk until they are used; then reading only the configuration costs next to nothing.
        remedy: what to do if it cannot be read, for messages.

    Returns:
        The dictionary that fairseq saved: ``cfg``, ``model``, ``extra_state`` and so on.

    Raises:
        AlmaError: if the file is missing, truncated, or no checkpoint of fairseq.
    """
    path = Path(path)
    if not path.is_file():
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}")
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise AlmaError(f"{path}: no checkpoint, or a truncated one ({size:,} bytes, not a zip archive); {remedy}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # whose first line advises to run whatever the file holds
            reason = "damaged, or it holds more than weights and plain data"
        raise AlmaError(f"{path}: cannot be loaded as a checkpoint ({reason}); {remedy}") from error
    if not isinstance(checkpoint, dict) or "model" not in checkpoint or not _has_config(checkpoint):
        raise AlmaError(f"{path}: no checkpoint of fairseq, it lacks 'model' or 'cfg'; {remedy}")
    return checkpoint


def _has_config(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("cfg"), dict) and isinstance(checkpoint["cfg"].get("model"), dict)


def starting_checkpoint(finetune_from_model: Optional[str], restore_file: str) -> Optional[str]:
    """Return the checkpoint that fairseq-train was told to start from, or None.

    Args:
        finetune_from_model: value of ``--finetune-from-model``.
        restore_file: value of ``--restore-file``; its default names the run's own last checkpoint.
    """
    if finetune_from_model is not None:
        return finetune_from_model
    return None if restore_file == LAST_CHECKPOINT else restore_file


def write_checkpoint(checkpoint: Checkpoint, path: Union[str, Path]) -> None:
    """Save a checkpoint so that it appears under its name only when it is complete.

    Args:
        checkpoint: what `read_checkpoint` returns.
        path: the file; replaced if it exists.
    """
    with open_atomically(Path(path)) as file:
        torch.save(checkpoint, file)
