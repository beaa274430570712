"""Register the tasks ``alma_lm`` and ``alma_image_classification`` in fairseq."""

from fairseq_alma.images import image_task as alma_image_classification
from fairseq_alma.text import task as alma_lm

__all__ = ["alma_image_classification", "alma_lm"]
