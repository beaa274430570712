"""``alma_moe_vgg``: the VGG network with mixtures of experts as convolutions (paper v5, section 5)."""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from fairseq.models import register_model

from fairseq_alma.models.alma_mlp import require_positive
from fairseq_alma.models.alma_vgg import require_large_enough
from fairseq_alma.models.image_classifier import ImageClassifier
from fairseq_alma.models.moe_options import MixtureConfig, mixture_options, trees_of
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.vgg import NUM_CONVOLUTIONS
from fairseq_alma.modules.moe.image_mixtures import MixtureVGG


@dataclass
class AlmaMoEVGGConfig(MixtureConfig):
    """Options of a VGG network of mixtures."""

    channels: int = field(default=32, metadata={"help": "feature maps of each expert; the paper: 4 to 64"})


@register_model("alma_moe_vgg", dataclass=AlmaMoEVGGConfig)
class AlmaMoEVGG(ImageClassifier):
    """A VGG network of mixtures."""

    @classmethod
    def build_network(cls, cfg: AlmaMoEVGGConfig, image_shape: Sequence[int], num_classes: int) -> ImageNetwork:
        """Build the network; see `ImageClassifier`."""
        require_positive("--channels", cfg.channels)
        require_large_enough("alma_moe_vgg", image_shape)
        return MixtureVGG(image_shape, num_classes, cfg.channels, trees_of(cfg, NUM_CONVOLUTIONS), str(cfg.gate))

    @classmethod
    def options_of(cls, network: ImageNetwork) -> Mapping[str, Any]:
        """Return what growth has changed."""
        return mixture_options(network)
