"""Checkpoint files between two launches of fairseq-train: which one is complete, how far it is, what must be kept.

fairseq writes ``checkpoint_E_U.pt`` atomically and then copies it to ``checkpoint_last.pt``, where it looks first after
a restart. A kill during the copy leaves a truncated ``checkpoint_last.pt``.
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
    """How far a checkpoint is.

    Attributes:
        num_updates: updates since the stage began.
        num_epochs: epochs that are complete.
        train_tokens: tokens that these updates trained on, each pass counted.
        first_update: updates that the optimizer had made when the stage began.
        batches: how sequences were cut into updates, and from which update on; see `carried_optimizer.TokenCount`.
    """

    num_updates: int
    num_epochs: int
    train_tokens: int
    first_update: int = 0
    batches: Sequence[Mapping[str, Any]] = ()

    def has_reached(self, max_update: Optional[int], max_epoch: Optional[int]) -> bool:
        """Return whether training to one of these limits is over; fairseq would make one more update."""
        return (max_update is not None and self.num_updates >= max_update) or (
            max_epoch is not None and self.num_epochs >= max_epoch
        )


@once_per_file
def is_complete(path: Path) -> bool:
    """Return whether a file was written to its end: what torch saves is a zip file, whose directory comes last."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def is_sound(path: Path) -> bool:
    """Return whether a file is complete and undamaged, which a crash of the machine may prevent; reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        return False


def repair_last(folder: Path) -> Optional[Path]:
    """Repair ``checkpoint_last.pt`` after a kill, from the newest sound checkpoint of the folder.

    Args:
        folder: the save directory of one model; it need not exist.

    Returns:
        The checkpoint that the next launch resumes from; None: it starts the stage again.
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
            with open_atomically(last) as copy, open(path, "rb") as whole:  # no link: fairseq would overwrite both
                shutil.copyfileobj(whole, copy)
            return last
    return None


@once_per_file
def read_progress(path: Path) -> Progress:
    """Read how far a checkpoint is."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint  # imports torch, which a dry run does not need

    remedy = "remove it, and the stage resumes from the checkpoint before it, or from its beginning"
    state = read_checkpoint(path, remedy=remedy, needed=("extra_state", "optimizer_history"))
    iterator, counts = (state["extra_state"].get(key) for key in ("train_iterator", TASK_STATE))
    if iterator is None or not isinstance(counts, dict) or not isinstance(counts.get(TRAIN_TOKENS), int):
        raise AlmaError(
            f"{path}: the checkpoint does not count the tokens it was trained on; it must come from "
            "fairseq-train --task alma_lm of this package; remove its folder to train the stage again"
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
    """Remove the optimizer's moments, two thirds of the file, from a checkpoint; all other keys stay."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint

    state = read_checkpoint(path)
    if state.pop("last_optimizer_state", None) is not None:
        write_checkpoint(state, path)


def keep_only_last(folder: Path, others: Collection[str] = ()) -> None:
    """Remove all checkpoints of a save directory but the last and ``others``, once the last is on the disk."""
    synchronise(folder / LAST_CHECKPOINT, folder)
    for path in _files(folder):
        if path.name not in (LAST_CHECKPOINT, *others):
            path.unlink()


def remove_all(folder: Path) -> None:
    """Remove every checkpoint of a save directory, and the directory when nothing else is in it."""
    if not folder.is_dir():
        return
    for path in _files(folder):
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _files(folder: Path) -> list[Path]:
    """Return a save directory's checkpoints, truncated ones included."""
    return [*folder.glob("checkpoint*.pt*"), *folder.glob(".checkpoint*.tmp")]
