"""Registered image models (paper v5, section 5 and Appendices B.1.1 and B.1.2).

- ``alma_mlp``: fully connected network, by default with two hidden layers with ReLU
- ``alma_vgg``: VGG19 with batch norm and the same number of channels in every layer
- ``alma_moe_mlp``: ``alma_mlp`` with mixtures of experts as hidden layers
- ``alma_moe_vgg``: ``alma_vgg`` with mixtures of experts as convolutions
- ``alma_firefly_vgg``: VGG network that Firefly grows
- ``alma_umix``: several networks trained jointly on the mean or sum of their logits (UMix); for example
  ``--arch alma_umix --num-members 5 --member-arch alma_mlp --member-options "--width 64"``

`ImageClassifier` contains a network of N members; `ImageEnsemble` contains trained models. ``alma-stream`` trains the
network directly; fairseq's commands train and test the `ImageClassifier`. To add an architecture, define the network in
``networks.py``, and a subclass of `ImageClassifier` that builds the network from options in ``image_models.py``.

Letters in shapes: N members, B images, C channels, H height, W width, K classes.
"""

import argparse
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, NoReturn, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
    register_model,
)
from torch import Tensor, nn

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.ensemble_file import load_embedded, log_of_mean
from fairseq_alma.checkpoints.model_options import GrownVGGOptions, JointOptions, MixtureOptions, MLPOptions, VGGOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, parse_gate_trees
from fairseq_alma.images.mixtures import MixtureConv, MixtureMLP
from fairseq_alma.images.networks import (
    MLP,
    NUM_CONVOLUTIONS,
    SMALLEST_IMAGE,
    VGG,
    ImageKind,
    ImageNetwork,
    NetworkList,
)
from fairseq_alma.training.stage_task import check_options, fairseq_config


@dataclass(frozen=True)
class GrownLayers:
    """Layer sizes that growth changes: gate tree of each mixture layer, or output channels of each convolution."""

    trees: tuple[GateTree, ...] = ()
    channels: tuple[int, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return the layer sizes as model options, which `ImageClassifier.read_grown` reads."""
        if self.trees:
            return {"num_experts": self.trees[0].num_experts, "gate_trees": format_gate_trees(self.trees)}
        return {"layer_channels": ",".join(map(str, self.channels))} if self.channels else {}


class ImageClassifier(BaseFairseqModel):
    """fairseq model for image classification: a single or a joint model."""

    stacks_members: ClassVar[bool] = True  # whether `build_network` can build several members as one network

    def __init__(self, network: ImageNetwork) -> None:
        super().__init__()
        self.network = network

    @classmethod
    def build_model(
        cls, cfg: Any, task: Any, num_members: int = 1, joint_logits: Optional[str] = None
    ) -> "ImageClassifier":
        """Build a single model, or a joint model of ``num_members`` members, for the images of a task."""
        if not hasattr(task, "image_shape"):
            raise AlmaError(f"{cls.__name__}: the task does not provide images; give --task alma_image_classification")
        check_options(cfg)
        network = cls.build_members(cfg, ImageKind(task.image_shape, task.num_classes), num_members)
        network.reset_parameters([torch.default_generator] * num_members)
        network.joint_logits = joint_logits
        return cls(network)

    @classmethod
    def build_members(
        cls, cfg: Any, images: ImageKind, num_members: int, grown: Optional[GrownLayers] = None
    ) -> ImageNetwork:
        """Build a network of N members with uninitialized weights.

        Args:
            cfg: options of the model.
            images: shape and number of classes of the images.
            num_members: number of members N.
            grown: layer sizes after growth; None: layer sizes in ``cfg``.

        Raises:
            AlmaError: the options contradict each other, or the images are too small for the architecture.
        """
        grown = cls.read_grown(cfg) if grown is None else grown
        if cls.stacks_members or num_members == 1:
            return cls.build_network(cfg, images, grown, num_members)
        return NetworkList([cls.build_network(cfg, images, grown, 1) for _ in range(num_members)])

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> ImageNetwork:
        """Build one network with layer sizes ``grown``; see `build_members`."""
        raise NotImplementedError

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        """Return the layer sizes after growth from the model options. Raises AlmaError for an invalid option."""
        return GrownLayers()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) for normalized images (B, C, H, W)."""
        if self.training:
            self.network.check_batch(len(images))
        return self.network(images)[0]


class ImageEnsemble(BaseFairseqModel):
    """Ensemble of trained image models as one model for evaluation.

    Args:
        members: trained models.
        weights: weight of each member's probabilities; the sum is 1.
        embedded: indices of the members whose weights the checkpoint of the ensemble contains.
    """

    members: Any  # an nn.ModuleList; Any because mypy does not know the class of the members

    def __init__(self, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = list(weights)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        load_embedded(self.members, self.embedded, state_dict, strict)

    def forward(self, images: Tensor) -> Tensor:
        """Return fp32 log-probabilities (B, K) for normalized images (B, C, H, W)."""
        return log_of_mean((F.log_softmax(each(images).float(), dim=-1) for each in self.members), self.weights)


def image_architectures() -> list[str]:
    """Return the sorted names of the registered architectures of single image models."""
    models = {name: MODEL_REGISTRY[key] for name, key in ARCH_MODEL_NAME_REGISTRY.items()}
    return sorted(name for name, kind in models.items() if isinstance(kind, type) and issubclass(kind, ImageClassifier))


AlmaMLPConfig = fairseq_config("AlmaMLPConfig", FairseqDataclass, [MLPOptions])
AlmaVGGConfig = fairseq_config("AlmaVGGConfig", FairseqDataclass, [VGGOptions])
AlmaMoEMLPConfig = fairseq_config("AlmaMoEMLPConfig", FairseqDataclass, [MixtureOptions, MLPOptions])
AlmaMoEVGGConfig = fairseq_config("AlmaMoEVGGConfig", FairseqDataclass, [MixtureOptions, VGGOptions])
AlmaFireflyVGGConfig = fairseq_config("AlmaFireflyVGGConfig", FairseqDataclass, [VGGOptions, GrownVGGOptions])


@register_model("alma_mlp", dataclass=AlmaMLPConfig)
class AlmaMLP(ImageClassifier):
    """Fully connected network with hidden layers of equal width."""

    @classmethod
    def build_network(cls, cfg: MLPOptions, images: ImageKind, grown: GrownLayers, num_members: int) -> MLP:
        return MLP(*images, cfg.width, cfg.hidden_layers, num_members)


@register_model("alma_vgg", dataclass=AlmaVGGConfig)
class AlmaVGG(ImageClassifier):
    """VGG network with the same number of channels in every layer."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> VGG:
        return _build_vgg("alma_vgg", images, cfg, [cfg.channels] * NUM_CONVOLUTIONS, num_members)


@register_model("alma_moe_mlp", dataclass=AlmaMoEMLPConfig)
class AlmaMoEMLP(ImageClassifier):
    """Fully connected network with mixtures of experts as hidden layers."""

    stacks_members = False  # mixtures with different gate trees cannot be stacked

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> MixtureMLP:
        return MixtureMLP(*images, cfg.width, grown.trees, str(cfg.gate))

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        return GrownLayers(trees=tuple(parse_gate_trees(cfg.gate_trees, cfg.hidden_layers, cfg.num_experts)))


@register_model("alma_moe_vgg", dataclass=AlmaMoEVGGConfig)
class AlmaMoEVGG(ImageClassifier):
    """VGG network with mixtures of experts as convolutions."""

    stacks_members = False

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> VGG:
        channels = [cfg.channels] * NUM_CONVOLUTIONS
        sizes = zip([images.shape[0], *channels[:-1]], channels, grown.trees, strict=True)
        blocks = [MixtureConv(before, after, tree, str(cfg.gate)) for before, after, tree in sizes]
        return _build_vgg("alma_moe_vgg", images, cfg, channels, 1, blocks)

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        return GrownLayers(trees=tuple(parse_gate_trees(cfg.gate_trees, NUM_CONVOLUTIONS, cfg.num_experts)))


@register_model("alma_firefly_vgg", dataclass=AlmaFireflyVGGConfig)
class AlmaFireflyVGG(ImageClassifier):
    """VGG network to which Firefly adds channels."""

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> VGG:
        return _build_vgg("alma_firefly_vgg", images, cfg, grown.channels, num_members)

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        if not cfg.layer_channels:
            return GrownLayers(channels=(cfg.channels,) * NUM_CONVOLUTIONS)
        words = [word.strip() for word in cfg.layer_channels.split(",")]
        if len(words) != NUM_CONVOLUTIONS or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise AlmaError(
                f"--layer-channels {cfg.layer_channels}: expected {NUM_CONVOLUTIONS} comma-separated numbers of at "
                "least 1, one for each convolution; remove the option to use --channels in every layer"
            )
        channels = tuple(map(int, words))
        if min(channels) < cfg.channels:
            raise AlmaError(
                f"--layer-channels {cfg.layer_channels}: a layer has {min(channels)} channels, fewer than --channels "
                f"{cfg.channels}; set --channels to the number of channels before any growth"
            )
        return GrownLayers(channels=channels)


def _build_vgg(
    arch: str,
    images: ImageKind,
    cfg: VGGOptions,
    channels: Sequence[int],
    num_members: int,
    blocks: Optional[Sequence[nn.Module]] = None,
) -> VGG:
    """Build a VGG network. Raises AlmaError if the images are too small for the max pooling layers."""
    (_, height, width), last_pool = images.shape, str(cfg.last_pool)
    option, smallest = (" --last-pool max", 2 * SMALLEST_IMAGE) if last_pool == "max" else ("", SMALLEST_IMAGE)
    if min(height, width) < smallest:
        remedy = "--last-pool mean or " if min(height, width) >= SMALLEST_IMAGE else ""
        raise AlmaError(
            f"--arch {arch}{option}: expected images of at least {smallest} x {smallest} pixels, found {height} x "
            f"{width}; give {remedy}an --arch without convolutions"
        )
    return VGG(*images, channels, num_members, last_pool, str(cfg.initial_weights), blocks)


AlmaUMixConfig: Any = fairseq_config("AlmaUMixConfig", FairseqDataclass, [JointOptions])


@register_model(JOINT_MODEL, dataclass=AlmaUMixConfig)
class AlmaUMix(BaseFairseqModel):
    """fairseq model ``alma_umix``, which builds an `ImageClassifier` with several members."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> BaseFairseqModel:
        """Build a model whose members have different initial weights. Raises AlmaError as `member_config` does."""
        check_options(cfg)
        model, config = cls.member_config(cfg.member_arch, cfg.member_options)
        return model.build_model(config, task, cfg.num_members, str(cfg.joint_logits))

    @classmethod
    def member_config(cls, arch: str, member_options: str) -> tuple[Any, FairseqDataclass]:
        """Return (class, configuration) of the members, from the values of ``--member-arch`` and ``--member-options``.

        Raises:
            AlmaError: the architecture cannot be a member, or a member option is invalid.
        """
        possible, name = image_architectures(), ARCH_MODEL_NAME_REGISTRY.get(arch, "")
        if arch not in possible:
            raise AlmaError(f"--member-arch {arch}: cannot be a member; choose from {', '.join(possible)}")
        model: Any = MODEL_REGISTRY[name]
        parser = _MemberParser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
        model.add_args(parser)
        try:
            words = shlex.split(member_options)
        except ValueError as error:
            parser.error(f"{member_options!r}: {error}")
        options = parser.parse_args(words)
        ARCH_CONFIG_REGISTRY[arch](options)
        return model, MODEL_DATACLASS_REGISTRY[name].from_namespace(options)


class _MemberParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AlmaError(f"--member-options: {message}; give only options of --member-arch")
