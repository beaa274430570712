"""Register the criterions ``alma_switch_cross_entropy`` and ``alma_image_cross_entropy`` in fairseq."""

from fairseq_alma.images import image_task as alma_image_cross_entropy
from fairseq_alma.text import losses as alma_switch_cross_entropy

__all__ = ["alma_image_cross_entropy", "alma_switch_cross_entropy"]
