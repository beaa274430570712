"""Tasks under their registered names: ``alma_lm``, ``alma_image_classification``."""

from fairseq_alma.tasks import alma_bpe, alma_image_classification, alma_lm, resumed_training

__all__ = ["alma_bpe", "alma_image_classification", "alma_lm", "resumed_training"]
