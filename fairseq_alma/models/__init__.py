"""Models under their registered names.

``alma_switch_lm`` with ``_tiny``, ``_base``, ``_large``; ``alma_ensemble`` and ``alma_umix``, which consist of others.
"""

from fairseq_alma.models import alma_ensemble, alma_switch_lm, alma_umix

__all__ = ["alma_ensemble", "alma_switch_lm", "alma_umix"]
