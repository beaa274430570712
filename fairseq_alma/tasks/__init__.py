"""Tasks under their registered names: ``alma_lm``."""

from fairseq_alma.tasks import alma_bpe, alma_lm

__all__ = ["alma_bpe", "alma_lm"]
