"""Optimizers that are registered in fairseq: ``fused_adam``, ``muon``."""

from fairseq_alma.optim import fused_adam, muon

__all__ = ["fused_adam", "muon"]
