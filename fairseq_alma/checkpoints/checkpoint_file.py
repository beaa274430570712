"""The one gate for checkpoints, fairseq's or ours: every command reads them here, and writes them here. No fairseq.

What comes from a file is never run and never evaluated, has the declared types and bounded sizes, and its weights are
finite numbers; anything else is refused in one line. `container`, `contents` and `model_weights` look, one after the
other.
"""

from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Union

import torch

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.container import UnfitCheckpoint, is_verified, load_archive, remember_verified
from fairseq_alma.checkpoints.contents import check_contents, check_finite
from fairseq_alma.checkpoints.model_weights import check_model
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically

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
        if not is_verified(path):
            check_finite(checkpoint)
            remember_verified(path)
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _has_config(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("cfg"), dict) and isinstance(checkpoint["cfg"].get("model"), dict)


def starting_checkpoint(
    finetune_from_model: Optional[str], restore_file: str, continue_once: Optional[str] = None
) -> Optional[str]:
    """Return the checkpoint that fairseq-train was told to start from, or None.

    Args:
        finetune_from_model: value of ``--finetune-from-model``.
        restore_file: value of ``--restore-file``; its default names the run's own last checkpoint.
        continue_once: value of ``--continue-once``, which counts as long as that is not there.
    """
    if continue_once is not None:
        return continue_once
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
