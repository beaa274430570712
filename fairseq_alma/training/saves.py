"""When checkpoints are written within a stage, and whether training waits for that.

``--save-interval-minutes`` goes by the clock, where fairseq counts updates. fairseq saves after an update whose number
is a multiple of ``--save-interval-updates``: once the time has come, that interval is the number of the update. Nothing
else changes; of several processes the clock of the first counts.

With ``--save-in-background`` a training stops for a copy of its state, not until the copy is in a file. The same files
appear under the same names in the same order, each whole from its first moment, some time later; of several processes
the first one writes, and all go on. fairseq's ``--write-checkpoints-asynchronously`` needs iopath and makes no
``checkpoint_last.pt``; torch's ``distributed.checkpoint.async_save`` writes a folder of shards, which would have to be
read and written once more for all that takes one file. Four functions of fairseq are replaced for it; without the
option they do what they did.
"""

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from torch import nn

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, Setting
from fairseq_alma.training.loading import replaced
from fairseq_alma.training.processes import decided_by_first


@dataclass
class TimedSaves(Feature):
    """Lets fairseq save now and then.

    Attributes:
        is_due: whether there is to be a checkpoint of the update that was just made.
    """

    save_interval_minutes: Optional[float] = opt(
        None,
        "save a checkpoint after so many minutes, beside those of --save-interval-updates",
        range=real(0, 1e8, above=True),
        side=TRAINING,
        kinds=("text",),
        metavar="M",
    )

    def __post_init__(self) -> None:
        self.is_due = False
        self._saved = time.monotonic()
        self._saving: Any = None

    def prepare(self, setting: Setting) -> None:
        """Note where fairseq looks for its interval."""
        self._saving = setting.saving
        self._interval = self._saving.save_interval_updates

    def after_step(self, model: nn.Module, update: int) -> None:
        """Look at the clock."""
        assert self.save_interval_minutes is not None  # else it is not on
        self.is_due = decided_by_first(time.monotonic() - self._saved >= 60 * self.save_interval_minutes)
        if self._saving is not None:
            self._saving.save_interval_updates = update + 1 if self.is_due else self._interval
        elif self.is_due:
            self._saved = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Keep nothing; whenever fairseq asks, it has named its checkpoint, which has the interval as it was given."""
        self._saved = time.monotonic()
        if self._saving is not None:
            self._saving.save_interval_updates = self._interval
        return {}


@dataclass
class SaveInBackground(Feature):
    """Lets checkpoints be written beside the training."""

    save_in_background: bool = opt(
        False,
        "a training stops for a copy of its state in memory, not until a checkpoint is written; the same files, each "
        "whole. Needs the memory of one more checkpoint",
        side=TRAINING,
        kinds=("text",),
    )


class BackgroundSaves:
    """Does one thing after the other in a thread; what one of them raises is raised when somebody waits."""

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None
        self._waiting: list[Callable[[], Any]] = []
        self.copies_weights = True
        self.is_collecting = False

    def add(self, job: Callable[[], Any]) -> None:
        """Note what is to be done when `begin` is called."""
        self._waiting.append(job)

    def begin(self) -> None:
        """Begin what was noted; before, `wait` must have been called."""
        assert self._thread is None
        jobs, self._waiting = self._waiting, []
        # no daemon: an interpreter that ends waits for it
        self._thread = threading.Thread(target=self._do, args=(jobs,), name="background saves")
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is done that was begun. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, jobs: list[Callable[[], Any]]) -> None:
        try:
            for job in jobs:
                job()
        except BaseException as error:
            self._error = error


SAVES = BackgroundSaves()


def as_it_is(state: dict[str, Any], copies_weights: bool) -> dict[str, Any]:
    """Return a copy that the training does not change any more; tensors that share memory share that of the copy.

    Args:
        state: of a training, on the CPU but for what features keep.
        copies_weights: False: weights and optimizer state were copied from a device already.
    """
    kept = [] if copies_weights else [state[key] for key in ("model", "last_optimizer_state") if key in state]
    return copy.deepcopy(state, {id(each): each for each in kept})


def _save(save: Callable, cfg: Any, trainer: Any, *arguments: Any, **more: Any) -> Any:
    """Stand in for ``checkpoint_utils.save_checkpoint``."""
    features = getattr(trainer.task, "features", None)
    if features is None or not features[SaveInBackground].is_on:
        return save(cfg, trainer, *arguments, **more)
    SAVES.wait()  # one at a time: there is memory for one copy
    cfg.write_checkpoints_asynchronously, SAVES.is_collecting = False, True
    SAVES.copies_weights = not trainer.cuda
    try:
        saved = save(cfg, trainer, *arguments, **more)
    finally:
        # for the end of fairseq-train, which waits by `PathManager.async_close` then; at its beginning it wants iopath
        cfg.write_checkpoints_asynchronously, SAVES.is_collecting = True, False
    SAVES.begin()
    return saved


def _write(write: Callable, state: Any, filename: str, *arguments: Any, **more: Any) -> Any:
    """Stand in for ``checkpoint_utils.torch_persistent_save``."""
    if not SAVES.is_collecting:
        return write(state, filename, *arguments, **more)
    kept = as_it_is(state, SAVES.copies_weights)
    SAVES.add(lambda: write(kept, filename, *arguments, **more))
    return None


def _name_later(copy_file: Callable, *arguments: Any, **more: Any) -> bool:
    """Stand in for ``PathManager.copy``."""
    if not SAVES.is_collecting:
        return copy_file(*arguments, **more)
    SAVES.add(lambda: copy_file(*arguments, **more))
    return True


def _close(close: Callable) -> bool:
    """Stand in for ``PathManager.async_close``, which fairseq-train calls at its end."""
    SAVES.wait()
    return close()


checkpoint_utils.save_checkpoint = replaced(checkpoint_utils.save_checkpoint, _save)
checkpoint_utils.torch_persistent_save = replaced(checkpoint_utils.torch_persistent_save, _write)
PathManager.copy = staticmethod(replaced(PathManager.copy, _name_later))
PathManager.async_close = staticmethod(replaced(PathManager.async_close, _close))
