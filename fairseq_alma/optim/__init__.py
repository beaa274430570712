"""Register the optimizers ``fused_adam`` and ``muon`` in fairseq."""

from fairseq_alma.optim import fused_adam, muon

__all__ = ["fused_adam", "muon"]
