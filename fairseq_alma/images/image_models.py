"""Image models under their registered names (paper v5, section 5 and Appendices B.1.1 and B.1.2).

- ``alma_mlp``: fully connected, two hidden layers with ReLU
- ``alma_vgg``: VGG19 with the same number of channels in every layer and batch norm
- ``alma_moe_mlp``, ``alma_moe_vgg``: the same with mixtures of experts as hidden layers or convolutions
- ``alma_firefly_vgg``: the VGG network that Firefly makes wider where its gradients ask for it

A new architecture is a network, and a class here with its options, how to build the network and what growth changes.
"""

from typing import Any, ClassVar

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from torch import Generator

from fairseq_alma.checkpoints.model_options import (
    GrownVGGOptions,
    MixtureOptions,
    MLPOptions,
    VGGOptions,
    VGGVariantOptions,
)
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import parse_gate_trees
from fairseq_alma.images.firefly import amount_to_add, grow_on_images
from fairseq_alma.images.image_classifier import GrownLayers, GrowthData, ImageClassifier
from fairseq_alma.images.mixtures import MixtureMLP, MixtureVGG, grow_losing_experts, mixture_layers
from fairseq_alma.images.networks import (
    MLP,
    NUM_CONVOLUTIONS,
    SMALLEST_IMAGE,
    VGG,
    ConvBlock,
    ImageKind,
    ImageNetwork,
    Variant,
)
from fairseq_alma.learners.learner import Growth
from fairseq_alma.training.fairseq_options import fairseq_config

AlmaMLPConfig = fairseq_config("AlmaMLPConfig", FairseqDataclass, [MLPOptions])


@register_model("alma_mlp", dataclass=AlmaMLPConfig)
class AlmaMLP(ImageClassifier):
    """A fully connected network."""

    @classmethod
    def build_network(cls, cfg: MLPOptions, images: ImageKind, grown: GrownLayers, num_members: int) -> MLP:
        return MLP(*images, cfg.width, cfg.hidden_layers, num_members)


AlmaVGGConfig = fairseq_config("AlmaVGGConfig", FairseqDataclass, [VGGVariantOptions, VGGOptions])


@register_model("alma_vgg", dataclass=AlmaVGGConfig)
class AlmaVGG(ImageClassifier):
    """A VGG network."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> VGG:
        variant = _variant("alma_vgg", images, cfg)
        return VGG(*images, [cfg.channels] * NUM_CONVOLUTIONS, num_members, variant=variant)


class MixtureClassifier(ImageClassifier):
    """Base of the models with mixtures: growth changes the gate trees, which members do not share."""

    stacks_members: ClassVar[bool] = False

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        """Return the number of mixtures that the options ask for."""
        raise NotImplementedError

    @classmethod
    def read_grown(cls, cfg: MixtureOptions) -> GrownLayers:
        return GrownLayers(trees=tuple(parse_gate_trees(cfg.gate_trees, cls.num_mixtures(cfg), cfg.num_experts)))

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        trees = [layer.gate.tree for layer in mixture_layers(network)]
        return GrownLayers(trees=tuple(trees[: len(trees) // network.num_members]))

    @classmethod
    def grow(
        cls, network: ImageNetwork, growth: Growth, cfg: Any, data: GrowthData, generator: Generator
    ) -> tuple[ImageNetwork, int]:
        for _ in range(growth.num_new):
            grow_losing_experts(network, *data.valid, generator, growth.method)
        return network, 0


AlmaMoEMLPConfig = fairseq_config("AlmaMoEMLPConfig", FairseqDataclass, [MixtureOptions, MLPOptions])


@register_model("alma_moe_mlp", dataclass=AlmaMoEMLPConfig)
class AlmaMoEMLP(MixtureClassifier):
    """A fully connected network of mixtures."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> MixtureMLP:
        return MixtureMLP(*images, cfg.width, grown.trees, str(cfg.gate))

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        return cfg.hidden_layers


AlmaMoEVGGConfig = fairseq_config("AlmaMoEVGGConfig", FairseqDataclass, [VGGVariantOptions, MixtureOptions, VGGOptions])


@register_model("alma_moe_vgg", dataclass=AlmaMoEVGGConfig)
class AlmaMoEVGG(MixtureClassifier):
    """A VGG network of mixtures."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> MixtureVGG:
        variant = _variant("alma_moe_vgg", images, cfg)
        return MixtureVGG(*images, cfg.channels, grown.trees, str(cfg.gate), variant=variant)

    @classmethod
    def num_mixtures(cls, cfg: Any) -> int:
        return NUM_CONVOLUTIONS


AlmaFireflyVGGConfig = fairseq_config(
    "AlmaFireflyVGGConfig", FairseqDataclass, [VGGVariantOptions, VGGOptions, GrownVGGOptions]
)


@register_model("alma_firefly_vgg", dataclass=AlmaFireflyVGGConfig)
class AlmaFireflyVGG(ImageClassifier):
    """A VGG network that grows."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> VGG:
        variant = _variant("alma_firefly_vgg", images, cfg)
        return VGG(*images, grown.channels, num_members, variant=variant)

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        return GrownLayers(channels=tuple(_channels_of(cfg)))

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        assert isinstance(network, VGG)
        channels = tuple(b.conv.weight.size(1) for b in network.blocks if isinstance(b, ConvBlock))
        return GrownLayers(channels=channels)

    @classmethod
    def check_growth(cls, cfg: Any, images: ImageKind, growth: Growth) -> None:
        amount_to_add(images.shape[0], int(cfg.channels), images.num_classes, growth.share, growth.share_of)

    @classmethod
    def grow(
        cls, network: ImageNetwork, growth: Growth, cfg: Any, data: GrowthData, generator: Generator
    ) -> tuple[ImageNetwork, int]:
        assert isinstance(network, VGG)
        images, labels = data.examples()
        how = data.batch_size, cfg.channels, growth.share, generator, growth.share_of
        return grow_on_images(network, images, labels, *how)


def _channels_of(cfg: Any) -> list[int]:
    """Return the channels of each layer. Raises AlmaError if ``layer_channels`` is not a list of them."""
    if not cfg.layer_channels:
        return [cfg.channels] * NUM_CONVOLUTIONS
    words = [word.strip() for word in cfg.layer_channels.split(",")]
    if len(words) != NUM_CONVOLUTIONS or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise AlmaError(
            f"--layer-channels {cfg.layer_channels}: {NUM_CONVOLUTIONS} numbers of at least 1 with commas are needed, "
            "one for each convolution; leave it out for --channels in every layer"
        )
    channels = [int(word) for word in words]
    if min(channels) < cfg.channels:
        raise AlmaError(
            f"--layer-channels {cfg.layer_channels}: a layer has {min(channels)} channels, fewer than --channels "
            f"{cfg.channels}; layers only grow, so give --channels as it was before any growth"
        )
    return channels


def _variant(arch: str, images: ImageKind, cfg: VGGVariantOptions) -> Variant:
    """Return the variant of the options. Raises AlmaError if images are too small for all poolings."""
    _, height, width = images.shape
    has_fifth = str(cfg.last_pool) == "max"
    smallest = 2 * SMALLEST_IMAGE if has_fifth else SMALLEST_IMAGE
    if min(height, width) < smallest:
        option = " --last-pool max" if has_fifth else ""
        raise AlmaError(
            f"--arch {arch}{option}: images of {height} by {width} pixels, at least {smallest} by {smallest} are "
            f"needed; give {'--last-pool mean, or ' if has_fifth else ''}--arch alma_mlp"
        )
    return Variant(str(cfg.last_pool), str(cfg.initial_weights))
