"""Checkpoint files: reading, writing, joining, and the facts that can be read off them. No fairseq."""

LAST_CHECKPOINT = "checkpoint_last.pt"
"""Where fairseq-train saves, and looks first after a restart; a finished model's file."""
JOINT_MODEL = "alma_umix"
"""The architecture of several models that are trained as one, on the mean of their logits."""
TASK_STATE, IMAGE_TASK_STATE = "AlmaLMTask", "AlmaImageClassificationTask"
"""Keys of ``extra_state`` for what features keep; fairseq wants the name of the task's class."""
TRAIN_TOKENS, FIRST_UPDATE, AVERAGE = "train_tokens", "first_update", "average"
"""Keys there: tokens trained on since the stage began, all passes; updates of the stages before, where the optimizer is
carried on, else not there; the averaged weights by the names of ``model``, fp32."""


class UnfitCheckpoint(ValueError):
    """Why a file is no checkpoint that can be used, in words that follow its name."""
