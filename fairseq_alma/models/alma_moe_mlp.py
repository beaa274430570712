"""``alma_moe_mlp``: the fully connected network with mixtures of experts as hidden layers (paper v5, section 5)."""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from fairseq.models import register_model

from fairseq_alma.models.alma_mlp import require_positive
from fairseq_alma.models.image_classifier import ImageClassifier
from fairseq_alma.models.moe_options import MixtureConfig, mixture_options, trees_of
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.moe.image_mixtures import MixtureMLP


@dataclass
class AlmaMoEMLPConfig(MixtureConfig):
    """Options of a fully connected network of mixtures."""

    width: int = field(default=64, metadata={"help": "units of each expert; the paper: 4 to 64"})
    hidden_layers: int = field(default=2, metadata={"help": "number of hidden layers, all mixtures"})


@register_model("alma_moe_mlp", dataclass=AlmaMoEMLPConfig)
class AlmaMoEMLP(ImageClassifier):
    """A fully connected network of mixtures."""

    @classmethod
    def build_network(cls, cfg: AlmaMoEMLPConfig, image_shape: Sequence[int], num_classes: int) -> ImageNetwork:
        """Build the network; see `ImageClassifier`."""
        require_positive("--width", cfg.width)
        require_positive("--hidden-layers", cfg.hidden_layers)
        trees = trees_of(cfg, cfg.hidden_layers)
        return MixtureMLP(image_shape, num_classes, cfg.width, trees, str(cfg.gate))

    @classmethod
    def options_of(cls, network: ImageNetwork) -> Mapping[str, Any]:
        """Return what growth has changed."""
        return mixture_options(network)
