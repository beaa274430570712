"""Models under their registered names: ``alma_switch_lm`` with ``_tiny``, ``_base``, ``_large``."""

from fairseq_alma.models import alma_switch_lm

__all__ = ["alma_switch_lm"]
