"""Checkpoint files: reading, writing, growing and joining, and figures of their models. No fairseq."""

LAST_CHECKPOINT = "checkpoint_last.pt"
"""Name of the checkpoint that fairseq-train writes last and resumes from."""
JOINT_MODEL = "alma_umix"
"""Architecture of several models trained jointly on the mean of their logits."""
TASK_STATE, IMAGE_TASK_STATE = "AlmaLMTask", "AlmaImageClassificationTask"
"""Keys of ``extra_state`` for the state of training features; fairseq requires the class name of the task."""
TRAIN_TOKENS, FIRST_UPDATE, AVERAGE = "train_tokens", "first_update", "average"
"""Keys of that state: tokens trained on in the stage, counted once per epoch; updates before the stage, only present if
the optimizer is carried on; averaged weights by their names in ``model``, fp32."""


class UnfitCheckpoint(ValueError):
    """The reason why a file cannot be used as a checkpoint, to be printed after its name."""
