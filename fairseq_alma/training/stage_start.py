"""How a training begins with a checkpoint of another one: with its weights alone, or with all that it has.

fairseq knows the former (``--finetune-from-model``) and resuming, of which ``--continue-once`` is a form: weights,
optimizer, number of updates, schedule, and the place in the data. A stage that carries the optimizer on takes all but
the place in the data; a branch takes that too. Both count their own updates and tokens from zero. Later launches resume
from the training's own last checkpoint, to which none of this applies.
"""

from typing import Any, Callable, Optional

from fairseq_alma.checkpoints.checkpoint_file import Checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.training.train_token_count import FIRST_UPDATE, TRAIN_TOKENS

RESUME, STAGE, BRANCH = "resume", "stage", "branch"
WAYS = (RESUME, STAGE, BRANCH)

Change = Callable[[Checkpoint], None]


def how_to_begin(way: str, path: Optional[str], task: str, optimizer: Optional[str]) -> Optional[Change]:
    """Return what is to be done to a checkpoint that ``--continue-once`` names; None: nothing.

    Args:
        way: one of `WAYS`.
        path: value of ``--continue-once``.
        task: class of the task, under whose name it counts.
        optimizer: class of the command's optimizer; None: it does not train.

    Raises:
        AlmaError: there is no such checkpoint named.
    """
    if way == RESUME:
        return None
    if path is None:
        raise AlmaError(f"--continue-as {way}: give the checkpoint to begin with as --continue-once")

    def change(checkpoint: Checkpoint) -> None:
        _require_same_optimizer(checkpoint, path, optimizer)
        begin(checkpoint, path, task, with_new_data=way == STAGE)

    return change


def begin(checkpoint: Checkpoint, path: str, task: str, with_new_data: bool) -> None:
    """Make a checkpoint the beginning of a training that has made no update of its own.

    Args:
        checkpoint: as `read_checkpoint` returns it; changed in place.
        path: its file, for the message.
        task: class of the task.
        with_new_data: begin with the first batch, not with the next one.

    Raises:
        AlmaError: it has no optimizer state.
    """
    if checkpoint.get("last_optimizer_state") is None:
        raise AlmaError(
            f"{path}: has no optimizer state, so a training cannot carry it on; give it as --finetune-from-model, or "
            "keep the state where the checkpoint is made"
        )
    state: dict[str, Any] = checkpoint["extra_state"]
    first_update = int(checkpoint["optimizer_history"][-1]["num_updates"])
    state[task] = {**state.get(task, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update}
    for name in ("best", "val_loss"):
        state.pop(name, None)
    if with_new_data:
        state["train_iterator"] = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        state["previous_training_time"] = 0


def _require_same_optimizer(checkpoint: Checkpoint, path: str, optimizer: Optional[str]) -> None:
    found = checkpoint["optimizer_history"][-1]["optimizer_name"]
    if optimizer not in (None, found):
        raise AlmaError(
            f"{path}: trained with {found}, the command trains with {optimizer}, which cannot carry its state on; give "
            "the same --optimizer, or the checkpoint as --finetune-from-model"
        )
