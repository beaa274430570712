"""Models that this package registers in fairseq.

- language models: ``alma_transformer_lm`` and ``alma_switch_lm``, each with the sizes ``_tiny`` to ``_large``
- image models (in ``images``): ``alma_mlp``, ``alma_vgg``, ``alma_moe_mlp``, ``alma_moe_vgg``, ``alma_firefly_vgg``
- models that consist of member models: ``alma_ensemble`` (language or image models), ``alma_umix`` (image models)
"""

from fairseq_alma.images import image_models
from fairseq_alma.models import alma_ensemble, alma_umix
from fairseq_alma.text import switch_lm as alma_switch_lm
from fairseq_alma.text import transformer_lm as alma_transformer_lm

__all__ = ["alma_ensemble", "alma_switch_lm", "alma_transformer_lm", "alma_umix", "image_models"]
