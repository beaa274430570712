"""Checkpoint files of a stage: repair after a kill, progress, and removal.

fairseq writes ``checkpoint_E_U.pt`` atomically and then copies it to ``checkpoint_last.pt``, which it loads after a
restart. A kill during the copy truncates ``checkpoint_last.pt``.
"""

import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Sequence

from fairseq_alma.checkpoints import FIRST_UPDATE, LAST_CHECKPOINT, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import once_per_file, open_atomically, synchronise
from fairseq_alma.training.carried_optimizer import BATCHES

_INTERVAL = re.compile(r"checkpoint_\d+_(\d+)\.pt")


@dataclass(frozen=True)
class Progress:
    """The progress of a training at a checkpoint.

    Attributes:
        num_updates: updates since the stage began.
        num_epochs: complete epochs.
        train_tokens: tokens of these updates, all epochs counted.
        first_update: updates of the optimizer before the stage.
        batches: batch sizes, and the update from which each holds; see `carried_optimizer.TokenCount`.
    """

    num_updates: int
    num_epochs: int
    train_tokens: int
    first_update: int = 0
    batches: Sequence[Mapping[str, Any]] = ()

    def has_reached(self, max_update: Optional[int], max_epoch: Optional[int]) -> bool:
        """Return whether one of the limits is reached; fairseq would make one more update."""
        return (max_update is not None and self.num_updates >= max_update) or (
            max_epoch is not None and self.num_epochs >= max_epoch
        )


@once_per_file
def is_complete(path: Path) -> bool:
    """Return whether a file is written to its end; the directory of a zip file, as torch writes it, comes last."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def is_sound(path: Path) -> bool:
    """Return whether a file is complete and undamaged after a crash of the machine; reads the full file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        return False


def repair_last(folder: Path) -> Optional[Path]:
    """Repair ``checkpoint_last.pt`` after a kill, from the newest undamaged checkpoint of the folder.

    Args:
        folder: save directory of one model; may be missing.

    Returns:
        The checkpoint from which the next launch resumes; None: the stage starts again.
    """
    for unfinished in folder.glob("checkpoint*.pt.tmp"):
        unfinished.unlink()
    last = folder / LAST_CHECKPOINT
    if is_sound(last):
        return last
    last.unlink(missing_ok=True)
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := _INTERVAL.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        if is_sound(path):
            with open_atomically(last) as copy, open(path, "rb") as source:  # no link: fairseq would overwrite both
                shutil.copyfileobj(source, copy)
            return last
    return None


@once_per_file
def read_progress(path: Path) -> Progress:
    """Read the progress of a checkpoint."""
    from fairseq_alma.checkpoints.checkpoint_file import (
        read_checkpoint,  # imports torch, which a dry run need not import
    )

    remedy = "remove it to resume the stage from the checkpoint before"
    state = read_checkpoint(path, remedy=remedy, needed=("extra_state", "optimizer_history"))
    iterator, counts = (state["extra_state"].get(key) for key in ("train_iterator", TASK_STATE))
    if iterator is None or not isinstance(counts, dict) or not isinstance(counts.get(TRAIN_TOKENS), int):
        raise AlmaError(
            f"{path}: the checkpoint has no count of training tokens; only fairseq-train --task alma_lm writes it; "
            "remove the folder to train the stage again"
        )
    first_update = int(counts.get(FIRST_UPDATE, 0))
    return Progress(
        num_updates=int(state["optimizer_history"][-1]["num_updates"]) - first_update,
        num_epochs=int(iterator["epoch"]) - 1,  # the iterator names the epoch of the next update, from 1
        train_tokens=int(counts[TRAIN_TOKENS]),
        first_update=first_update,
        batches=tuple(counts.get(BATCHES, ())),
    )


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer state, two thirds of the file, from a checkpoint."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint

    state = read_checkpoint(path)
    if state.pop("last_optimizer_state", None) is not None:
        write_checkpoint(state, path)


def keep_only_last(folder: Path, others: Collection[str] = ()) -> None:
    """Fsync the last checkpoint of a save directory, then remove all other checkpoints but ``others``."""
    synchronise(folder / LAST_CHECKPOINT, folder)
    for path in _files(folder):
        if path.name not in (LAST_CHECKPOINT, *others):
            path.unlink()


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a save directory, and the directory if it is empty then."""
    if not folder.is_dir():
        return
    for path in _files(folder):
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _files(folder: Path) -> list[Path]:
    """Return the checkpoints of a save directory, including truncated ones."""
    return [*folder.glob("checkpoint*.pt*"), *folder.glob(".checkpoint*.tmp")]
