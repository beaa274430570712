"""Read, write, grow and join checkpoint files, and compute the size and FLOPs of their models. No fairseq imports."""

LAST_CHECKPOINT = "checkpoint_last.pt"
"""Name of the checkpoint file that fairseq-train writes last, and from which it resumes."""
JOINT_MODEL = "alma_umix"
"""Architecture of several models that are trained jointly on the mean or sum of their logits."""
TASK_STATE, IMAGE_TASK_STATE = "AlmaLMTask", "AlmaImageClassificationTask"
"""Keys of ``extra_state`` that contain the state of training features; fairseq uses the class name of the task."""
TRAIN_TOKENS, FIRST_UPDATE, AVERAGE = "train_tokens", "first_update", "average"
"""Keys of the state of training features: training tokens of the stage, including repetitions in later epochs; number
of updates before the stage, only present with ``--carry-optimizer``; averaged weights in fp32, by name in ``model``."""


class UnfitCheckpoint(ValueError):
    """Error for a file that is not a usable checkpoint; the caller puts the file name before the message."""
