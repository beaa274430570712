"""Checkpoint files between two launches: which one is whole, how far it is, and what of it must stay.

Fairseq writes ``checkpoint_E_U.pt`` atomically and then copies it to ``checkpoint_last.pt``, where it looks first after
a restart. A kill during the copy leaves a truncated ``checkpoint_last.pt`` that no launch gets past.
"""

import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Collection, Optional

from fairseq_alma.checkpoints import FIRST_UPDATE, LAST_CHECKPOINT, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import once_per_file, open_atomically, synchronise

_INTERVAL = re.compile(r"checkpoint_\d+_(\d+)\.pt")


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is.

    Attributes:
        num_updates: updates since the stage began.
        num_epochs: epochs that are complete.
        train_tokens: tokens that these updates trained on, each pass counted.
        first_update: updates that the optimizer had made when the stage began.
    """

    num_updates: int
    num_epochs: int
    train_tokens: int
    first_update: int = 0

    def has_reached(self, max_update: Optional[int], max_epoch: Optional[int]) -> bool:
        """Tell whether training to one of these limits is over.

        Fairseq must not be launched on a finished checkpoint: it would do one more update.
        """
        return (max_update is not None and self.num_updates >= max_update) or (
            max_epoch is not None and self.num_epochs >= max_epoch
        )


@once_per_file
def is_whole(path: Path) -> bool:
    """Tell whether a file was written to its end: what torch saves is a zip file, its directory stands last."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def is_sound(path: Path) -> bool:
    """Tell whether a file is whole and has no damage inside, as a crash of the machine may leave; reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        return False


def repair_last(folder: Path) -> Optional[Path]:
    """Make ``checkpoint_last.pt`` whole again after a kill, from the newest whole checkpoint beside it.

    Args:
        folder: the save directory of one model; it need not exist.

    Returns:
        The checkpoint that the next launch resumes from, or None if it starts the stage again.
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
            _copy(path, last)
            return last
    return None


def _copy(path: Path, last: Path) -> None:
    """Let a checkpoint be the last one: a copy, not a link, as stock fairseq would write over it in place."""
    with open_atomically(last) as copy, open(path, "rb") as whole:
        shutil.copyfileobj(whole, copy)


@once_per_file
def read_progress(path: Path) -> Progress:
    """Read how far a checkpoint is."""
    # Imports torch, which takes seconds; a dry run or a finished run needs none of it.
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint

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
        # The iterator names the epoch that the next update belongs to, from 1.
        num_epochs=int(iterator["epoch"]) - 1,
        train_tokens=int(counts[TRAIN_TOKENS]),
        first_update=first_update,
    )


def drop_optimizer_state(path: Path) -> None:
    """Take the optimizer's moments, two thirds of the file, out of a checkpoint that is trained to its end.

    The stage that follows begins with a new optimizer. All other keys stay as fairseq wrote them.
    """
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint

    state = read_checkpoint(path)
    if state.pop("last_optimizer_state", None) is not None:
        write_checkpoint(state, path)


def keep_only_last(folder: Path, others: Collection[str] = ()) -> None:
    """Remove every checkpoint of a save directory but the last, once that is sure to outlive them.

    Args:
        folder: the save directory.
        others: names of further files that stay.
    """
    synchronise(folder / LAST_CHECKPOINT)
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
    """Return a save directory's checkpoints, those that were cut off included."""
    return [*folder.glob("checkpoint*.pt*"), *folder.glob(".checkpoint*.tmp")]
