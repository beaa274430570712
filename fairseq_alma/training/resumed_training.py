"""One line where fairseq-train cannot resume from a checkpoint's state of the training; fairseq shows a traceback.

The weights were looked at before the model was built. What else a training resumes from, moments, learning-rate
schedule, meters and position, is put in place by two functions of fairseq, which are replaced here; under other tasks
they do what they did.
"""

import functools
import os
from typing import Any, Callable

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.training_state import check_optimizer
from fairseq_alma.errors import AlmaError, causes, describe_fault
from fairseq_alma.training.loading import TASKS

_REMEDY = (
    "give the options that it was trained with, --reset-optimizer --reset-lr-scheduler --reset-meters "
    "--reset-dataloader to begin a new training with its weights, or an unaltered checkpoint"
)
_OTHER_BATCHES = "dataloader mismatch"


def _is_ours(trainer: Trainer) -> bool:
    return trainer.cfg.task._name in TASKS


def _replaced(function: Callable, by: Callable) -> Callable:
    """Return what calls ``by(function, …)``, once only."""
    if hasattr(function, "is_checked"):
        return function

    @functools.wraps(function)
    def checked(*arguments: Any, **more: Any) -> Any:
        return by(function, *arguments, **more)

    checked.is_checked = True  # type: ignore[attr-defined]
    return checked


def _load_state(load: Callable, trainer: Trainer, filename: str, *arguments: Any, **more: Any) -> Any:
    """Stand in for ``Trainer.load_checkpoint``."""
    if not _is_ours(trainer) or not os.path.isfile(filename):
        return load(trainer, filename, *arguments, **more)
    _ = trainer.optimizer  # built here, as wrong options are no fault of the file
    try:
        extra_state = load(trainer, filename, *arguments, **more)
        check_optimizer(trainer.optimizer.optimizer)
        return extra_state
    except Exception as error:
        for each in causes(error):
            if isinstance(each, AlmaError):
                raise each from None
        if describe_fault(error) is not None:
            raise
        is_sentence = isinstance(error, (AssertionError, ValueError, UnfitCheckpoint))
        reason = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        raise AlmaError(f"{filename}: no training resumes from it ({reason[:300]}); {_REMEDY}") from error


def _load_position(load: Callable, cfg: Any, trainer: Trainer, **arguments: Any) -> Any:
    """Stand in for ``checkpoint_utils.load_checkpoint``."""
    try:
        return load(cfg, trainer, **arguments)
    except RuntimeError as error:
        if not _is_ours(trainer) or _OTHER_BATCHES not in str(error):
            raise
        raise AlmaError(
            f"{cfg.save_dir}: its checkpoint is at a batch that an epoch of this command does not have; {_REMEDY}"
        ) from error


Trainer.load_checkpoint = _replaced(Trainer.load_checkpoint, _load_state)
checkpoint_utils.load_checkpoint = _replaced(checkpoint_utils.load_checkpoint, _load_position)
