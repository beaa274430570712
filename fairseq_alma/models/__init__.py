"""Models that this package registers in fairseq.

- language models: ``alma_transformer_lm`` and ``alma_switch_lm``, each with the sizes ``_tiny`` to ``_large``
- image models (in ``images``): ``alma_mlp``, ``alma_vgg``, ``alma_moe_mlp``, ``alma_moe_vgg``, ``alma_firefly_vgg``,
  ``alma_umix``
- ensembles of language or image models: ``alma_ensemble``
"""

from fairseq_alma.images import image_models
from fairseq_alma.models import alma_ensemble
from fairseq_alma.text import switch_lm as alma_switch_lm
from fairseq_alma.text import transformer_lm as alma_transformer_lm

__all__ = ["alma_ensemble", "alma_switch_lm", "alma_transformer_lm", "image_models"]
