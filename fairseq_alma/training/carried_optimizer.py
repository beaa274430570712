"""A training that goes on from another one with all that it has, and counts its own updates and tokens from zero.

fairseq knows two ways to begin with a checkpoint: with its weights alone (``--finetune-from-model``), and resuming, of
which ``--continue-once`` is a form: weights, optimizer, number of updates, schedule, and the place in the data. A stage
that carries the optimizer on takes all but the place in the data; a branch takes that too. Later launches resume from
the training's own last checkpoint, to which none of this applies.
"""

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import TRAINING, opt
from fairseq_alma.training.feature import Feature, Setting, register_feature

TASK_STATE = "AlmaLMTask"
"""Key of ``extra_state`` where checkpoints have what features keep; fairseq wants the name of the task's class."""
TRAIN_TOKENS = "train_tokens"
"""Key there: tokens trained on since the stage began, all passes."""
FIRST_UPDATE = "first_update"
"""Key there: updates of the stages before, where the optimizer is carried on; not there: none."""
RESUME, STAGE, BRANCH = "resume", "stage", "branch"
WAYS = (RESUME, STAGE, BRANCH)


@register_feature
@dataclass
class TokenCount(Feature):
    """Counts the tokens that a model was trained on, so that a stage that was cut off counts each one once.

    fairseq's own meters do not serve: they begin anew when a training is resumed at the start of an epoch.
    """

    @property
    def is_on(self) -> bool:
        """Whatever the options."""
        return True

    def __post_init__(self) -> None:
        self.num_tokens: Any = 0
        self.first_update = 0

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Count the tokens of an update, of all processes."""
        # A sum over processes is a tensor and stays one: asking a GPU for its value after each update stalls it.
        self.num_tokens = self.num_tokens + sum(log["ntokens"] for log in logs)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {TRAIN_TOKENS: int(self.num_tokens)} | ({FIRST_UPDATE: self.first_update} if self.first_update else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the count; not called when a stage begins with weights alone."""
        self.num_tokens, self.first_update = state[TRAIN_TOKENS], state.get(FIRST_UPDATE, 0)


@register_feature
@dataclass
class CarriedOptimizer(Feature):
    """Begins a stage, or a branch, with the optimizer, number of updates and schedule of the checkpoint before."""

    continue_as: str = opt(
        RESUME,
        "what --continue-once means: resume (fairseq's), begin a new stage with its optimizer, number of updates and "
        "schedule on new data (stage), or the same on the batches that come next (branch)",
        choices=WAYS,
        side=TRAINING,
    )

    def prepare(self, setting: Setting) -> None:
        """Refuse to begin with nothing."""
        if setting.start is None:
            raise AlmaError(f"--continue-as {self.continue_as}: give the checkpoint to begin with as --continue-once")

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Make the checkpoint the beginning of a training that has made no update of its own."""
        assert setting.start is not None
        found = checkpoint["optimizer_history"][-1]["optimizer_name"]
        if setting.optimizer not in (None, found):
            raise AlmaError(
                f"{setting.start}: trained with {found}, the command trains with {setting.optimizer}, which cannot "
                "carry its state on; give the same --optimizer, or the checkpoint as --finetune-from-model"
            )
        begin(checkpoint, setting.start, with_new_data=self.continue_as == STAGE)


def begin(checkpoint: dict[str, Any], path: str, with_new_data: bool) -> None:
    """Make a checkpoint the beginning of a training that has made no update of its own.

    Args:
        checkpoint: as `read_checkpoint` returns it; changed in place.
        path: its file, for the message.
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
    state[TASK_STATE] = {**state.get(TASK_STATE, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update}
    for name in ("best", "val_loss"):
        state.pop(name, None)
    if with_new_data:
        state["train_iterator"] = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        state["previous_training_time"] = 0
