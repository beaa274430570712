"""Tasks under their registered names: ``alma_lm``, ``alma_image_classification``."""

from fairseq_alma.images import image_task as alma_image_classification
from fairseq_alma.text import alma_bpe
from fairseq_alma.text import task as alma_lm
from fairseq_alma.training import resumed_training

__all__ = ["alma_bpe", "alma_image_classification", "alma_lm", "resumed_training"]
