"""Criterions under their registered names: ``alma_switch_cross_entropy``."""

from fairseq_alma.criterions import alma_switch_cross_entropy

__all__ = ["alma_switch_cross_entropy"]
