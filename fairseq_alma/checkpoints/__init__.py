"""Checkpoint files: reading, writing, joining, and the facts that can be read off them. No fairseq."""

LAST_CHECKPOINT = "checkpoint_last.pt"
"""Where fairseq-train saves, and looks first after a restart; a finished model's file."""
JOINT_MODEL = "alma_umix"
"""The architecture of several models that are trained as one, on the mean of their logits."""


class UnfitCheckpoint(ValueError):
    """Why a file is no checkpoint that can be used, in words that follow its name."""
