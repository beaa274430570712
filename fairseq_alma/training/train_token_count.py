"""Counts the tokens that a model was trained on, in its checkpoint, so that an interrupted stage counts each one once.

fairseq's own meters do not serve: they begin anew when a training is resumed at the start of an epoch.
"""

from typing import Any

TRAIN_TOKENS = "train_tokens"
"""Key in a checkpoint's ``extra_state[class of the task]``: tokens trained on since the stage began, all passes."""
FIRST_UPDATE = "first_update"
"""Key beside it: updates of the stages before, where the optimizer is carried on; not there: none."""


class TrainTokenCount:
    """Mixed into a task, in front of fairseq's class; fairseq saves and restores the count with each checkpoint."""

    num_train_tokens: Any = 0
    first_update = 0

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Count the tokens of an update, of all workers. fairseq calls this for every update that was made."""
        if criterion.training:
            # A sum over workers is a tensor and stays one: asking a GPU for its value after each update stalls it.
            self.num_train_tokens = self.num_train_tokens + sum(log["ntokens"] for log in logging_outputs)
        super().reduce_metrics(logging_outputs, criterion)  # type: ignore[misc]

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the task beside ``task_state``."""
        carried = {FIRST_UPDATE: self.first_update} if self.first_update else {}
        return {type(self).__name__: {TRAIN_TOKENS: int(self.num_train_tokens), **carried}}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Resume the count of an interrupted training; not called when a new stage begins with weights alone."""
        self.num_train_tokens = state[TRAIN_TOKENS]
        self.first_update = state.get(FIRST_UPDATE, 0)
