"""Optimizers under their registered names: ``fused_adam``."""

from fairseq_alma.optim import fused_adam

__all__ = ["fused_adam"]
