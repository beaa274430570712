"""Image models under their registered names (paper v5, section 5 and Appendices B.1.1 and B.1.2).

- ``alma_mlp``: fully connected, two hidden layers with ReLU
- ``alma_vgg``: VGG19 with the same number of channels in every layer and batch norm
- ``alma_moe_mlp``, ``alma_moe_vgg``: the same with mixtures of experts as hidden layers or convolutions
- ``alma_firefly_vgg``: the VGG network that Firefly widens, each layer by as much as its gradients ask for
"""

from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import parse_gate_trees
from fairseq_alma.images.image_classifier import GrownLayers, ImageClassifier
from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.mixtures import MixtureMLP, MixtureVGG, mixture_layers
from fairseq_alma.images.networks import (
    INITIAL_WEIGHTS,
    LAST_POOLS,
    MLP,
    NUM_CONVOLUTIONS,
    SMALLEST_IMAGE,
    VGG,
    ConvBlock,
    Variant,
)
from fairseq_alma.moe.mixture_layer import GATES


@dataclass
class AlmaMLPConfig(FairseqDataclass):
    """Options of a fully connected network."""

    width: int = field(default=64, metadata={"help": "neurons of each hidden layer; the paper: 4 to 64"})
    hidden_layers: int = field(default=2, metadata={"help": "number of hidden layers"})


@register_model("alma_mlp", dataclass=AlmaMLPConfig)
class AlmaMLP(ImageClassifier):
    """A fully connected network."""

    @classmethod
    def build_members(
        cls,
        cfg: AlmaMLPConfig,
        image_shape: Sequence[int],
        num_classes: int,
        num_members: int,
        grown: Optional[GrownLayers] = None,
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        require_positive("--width", cfg.width)
        require_positive("--hidden-layers", cfg.hidden_layers)
        return MLP(image_shape, num_classes, cfg.width, cfg.hidden_layers, num_members)


@dataclass
class VGGVariantConfig(FairseqDataclass):
    """Options in which the VGG network here and that of the paper's released code differ; the text leaves them open."""

    last_pool: ChoiceEnum(LAST_POOLS) = field(  # type: ignore[valid-type]
        default="mean",
        metadata={
            "help": "behind the last convolution: mean over the image; max: a fifth max pooling, as in the paper's "
            "released code"
        },
    )
    initial_weights: ChoiceEnum(INITIAL_WEIGHTS) = field(  # type: ignore[valid-type]
        default="he",
        metadata={"help": "of convolutions: he, fan-out, as VGG; default: torch's, as the paper's released code"},
    )


@dataclass
class AlmaVGGConfig(VGGVariantConfig):
    """Options of a VGG network."""

    channels: int = field(default=32, metadata={"help": "feature maps of every layer; the paper: 4 to 64"})


@register_model("alma_vgg", dataclass=AlmaVGGConfig)
class AlmaVGG(ImageClassifier):
    """A VGG network."""

    @classmethod
    def build_members(
        cls,
        cfg: AlmaVGGConfig,
        image_shape: Sequence[int],
        num_classes: int,
        num_members: int,
        grown: Optional[GrownLayers] = None,
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        require_positive("--channels", cfg.channels)
        require_large_enough("alma_vgg", image_shape, cfg)
        return VGG(image_shape, num_classes, [cfg.channels] * NUM_CONVOLUTIONS, num_members, variant=_variant(cfg))


@dataclass
class MixtureConfig(FairseqDataclass):
    """Options of mixtures of experts in the layers of an image model."""

    num_experts: int = field(default=1, metadata={"help": "experts in each mixture, of a model that has not grown"})
    gate: ChoiceEnum(GATES) = field(  # type: ignore[valid-type]
        default="soft",
        metadata={"help": "soft: mean of all experts, weighted; hard: one is drawn in training, the best one at test"},
    )
    gate_trees: str = field(
        default="", metadata={"help": "the choices of each mixture as nested lists of expert numbers; growth writes it"}
    )


class MixtureClassifier(ImageClassifier):
    """What models with mixtures have in common: what growth changes are the gates' trees."""

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        """Return the number of mixtures that the options ask for."""
        raise NotImplementedError

    @classmethod
    def read_grown(cls, cfg: MixtureConfig) -> GrownLayers:
        """Return the trees of the options; see `ImageClassifier`."""
        require_positive("--num-experts", cfg.num_experts)
        return GrownLayers(trees=tuple(parse_gate_trees(cfg.gate_trees, cls.num_mixtures(cfg), cfg.num_experts)))

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        """Return the trees of the network's gates; see `ImageClassifier`."""
        trees = [layer.gate.tree for layer in mixture_layers(network)]
        return GrownLayers(trees=tuple(trees[: len(trees) // network.num_members]))


@dataclass
class AlmaMoEMLPConfig(MixtureConfig):
    """Options of a fully connected network of mixtures."""

    width: int = field(default=64, metadata={"help": "neurons of each expert; the paper: 4 to 64"})
    hidden_layers: int = field(default=2, metadata={"help": "number of hidden layers, all mixtures"})


@register_model("alma_moe_mlp", dataclass=AlmaMoEMLPConfig)
class AlmaMoEMLP(MixtureClassifier):
    """A fully connected network of mixtures."""

    @classmethod
    def build_network(
        cls, cfg: AlmaMoEMLPConfig, image_shape: Sequence[int], num_classes: int, grown: Optional[GrownLayers] = None
    ) -> ImageNetwork:
        """Build the network; see `ImageClassifier`."""
        require_positive("--width", cfg.width)
        require_positive("--hidden-layers", cfg.hidden_layers)
        trees = (grown or cls.read_grown(cfg)).trees
        return MixtureMLP(image_shape, num_classes, cfg.width, trees, str(cfg.gate))

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        """Return the number of hidden layers."""
        return cfg.hidden_layers


@dataclass
class AlmaMoEVGGConfig(MixtureConfig, VGGVariantConfig):
    """Options of a VGG network of mixtures."""

    channels: int = field(default=32, metadata={"help": "feature maps of each expert; the paper: 4 to 64"})


@register_model("alma_moe_vgg", dataclass=AlmaMoEVGGConfig)
class AlmaMoEVGG(MixtureClassifier):
    """A VGG network of mixtures."""

    @classmethod
    def build_network(
        cls, cfg: AlmaMoEVGGConfig, image_shape: Sequence[int], num_classes: int, grown: Optional[GrownLayers] = None
    ) -> ImageNetwork:
        """Build the network; see `ImageClassifier`."""
        require_positive("--channels", cfg.channels)
        require_large_enough("alma_moe_vgg", image_shape, cfg)
        trees = (grown or cls.read_grown(cfg)).trees
        return MixtureVGG(image_shape, num_classes, cfg.channels, trees, str(cfg.gate), variant=_variant(cfg))

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        """Return the number of convolutions."""
        return NUM_CONVOLUTIONS


@dataclass
class AlmaFireflyVGGConfig(VGGVariantConfig):
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
        cls,
        cfg: AlmaFireflyVGGConfig,
        image_shape: Sequence[int],
        num_classes: int,
        num_members: int,
        grown: Optional[GrownLayers] = None,
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        channels = (grown or cls.read_grown(cfg)).channels
        require_large_enough("alma_firefly_vgg", image_shape, cfg)
        return VGG(image_shape, num_classes, channels, num_members, variant=_variant(cfg))

    @classmethod
    def read_grown(cls, cfg: AlmaFireflyVGGConfig) -> GrownLayers:
        """Return the channels of the options; see `ImageClassifier`."""
        return GrownLayers(channels=tuple(_channels_of(cfg)))

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        """Return the channels of the network; see `ImageClassifier`."""
        assert isinstance(network, VGG)
        return GrownLayers(channels=tuple(b.conv.weight.size(1) for b in network.blocks if isinstance(b, ConvBlock)))


def _channels_of(cfg: AlmaFireflyVGGConfig) -> list[int]:
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


def require_positive(option: str, value: int) -> None:
    """Raise AlmaError unless a number is at least 1."""
    if value < 1:
        raise AlmaError(f"{option} {value}: a number of at least 1 is needed")


def require_large_enough(arch: str, image_shape: Sequence[int], cfg: VGGVariantConfig) -> None:
    """Raise AlmaError if nothing would be left of an image after all poolings."""
    _, height, width = image_shape
    has_fifth = str(cfg.last_pool) == "max"
    smallest = 2 * SMALLEST_IMAGE if has_fifth else SMALLEST_IMAGE
    if min(height, width) < smallest:
        option = " --last-pool max" if has_fifth else ""
        raise AlmaError(
            f"--arch {arch}{option}: images of {height} by {width} pixels, at least {smallest} by {smallest} are "
            f"needed; give {'--last-pool mean, or ' if has_fifth else ''}--arch alma_mlp"
        )


def _variant(cfg: VGGVariantConfig) -> Variant:
    return Variant(str(cfg.last_pool), str(cfg.initial_weights))
