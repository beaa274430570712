"""``alma_firefly_vgg``: the VGG network that Firefly widens, each layer by as much as its gradients ask for.

What it computes is a VGG network (``alma_vgg``) with a number of channels for each layer; growing it is the matter of
`fairseq_alma.modules.images.firefly`.
"""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model

from fairseq_alma.errors import AlmaError
from fairseq_alma.models.alma_mlp import require_positive
from fairseq_alma.models.alma_vgg import require_large_enough
from fairseq_alma.models.image_classifier import ImageClassifier
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.vgg import NUM_CONVOLUTIONS, VGG, ConvBlock


@dataclass
class AlmaFireflyVGGConfig(FairseqDataclass):
    """Options of a VGG network that grows."""

    channels: int = field(
        default=32, metadata={"help": "feature maps of every layer before any growth; the paper: 4 to 64"}
    )
    layer_channels: str = field(
        default="",
        metadata={
            "help": "feature maps of each layer, sixteen numbers with commas; growth writes it; empty: --channels"
        },
    )


@register_model("alma_firefly_vgg", dataclass=AlmaFireflyVGGConfig)
class AlmaFireflyVGG(ImageClassifier):
    """A VGG network that grows."""

    @classmethod
    def build_members(
        cls, cfg: AlmaFireflyVGGConfig, image_shape: Sequence[int], num_classes: int, num_members: int
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        channels = channels_of(cfg)
        require_large_enough("alma_firefly_vgg", image_shape)
        return VGG(image_shape, num_classes, channels, num_members)

    @classmethod
    def options_of(cls, network: ImageNetwork) -> Mapping[str, Any]:
        """Return what growth has changed."""
        assert isinstance(network, VGG)
        channels = [block.conv.weight.size(1) for block in network.blocks if isinstance(block, ConvBlock)]
        return {"layer_channels": ",".join(map(str, channels))}


def channels_of(cfg: AlmaFireflyVGGConfig) -> list[int]:
    """Return the channels of each layer. Raises AlmaError if the options say no such thing."""
    require_positive("--channels", cfg.channels)
    if not cfg.layer_channels:
        return [cfg.channels] * NUM_CONVOLUTIONS
    words = [word.strip() for word in cfg.layer_channels.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise AlmaError(
            f"--layer-channels {cfg.layer_channels!r}: numbers of at least 1 with commas are needed, as growth writes "
            "them; leave it out for --channels in every layer"
        )
    if len(words) != NUM_CONVOLUTIONS:
        raise AlmaError(
            f"--layer-channels {cfg.layer_channels}: {len(words)} numbers, {NUM_CONVOLUTIONS} are needed, one for each "
            "convolution; leave it out for --channels in every layer"
        )
    channels = [int(word) for word in words]
    if min(channels) < cfg.channels:
        raise AlmaError(
            f"--layer-channels {cfg.layer_channels}: a layer of {min(channels)}, fewer than --channels {cfg.channels}, "
            "from which layers only grow; give --channels as it was before any growth"
        )
    return channels
