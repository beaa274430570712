"""Classes of image models: `ImageClassifier` contains a network of N members; `ImageEnsemble` contains trained models.

A subclass of `ImageClassifier` builds a network from the options of an architecture. ``alma-stream`` trains the network
directly; fairseq's commands train and test the `ImageClassifier`.

Letters in shapes: N members, B images, C channels, H height, W width, K classes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor, nn

from fairseq_alma.checkpoints.ensemble_file import TrainedMembers, log_of_mean
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.networks import ImageKind, ImageNetwork, NetworkList, join_logits
from fairseq_alma.training.fairseq_options import check_options

Examples = tuple[Tensor, Tensor]
"""(normalized images (B, C, H, W), labels (B))."""


@dataclass(frozen=True)
class GrownLayers:
    """Layer sizes that growth changes: gate tree of each mixture layer, or output channels of each convolution."""

    trees: tuple[GateTree, ...] = ()
    channels: tuple[int, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return the layer sizes as model options, which `ImageClassifier.read_grown` reads.

        Raises:
            AlmaError: a gate tree is too deeply nested for the ``json`` module.
        """
        options: dict[str, Any] = {}
        if self.trees:
            options.update(num_experts=self.trees[0].num_experts, gate_trees=format_gate_trees(self.trees))
        if self.channels:
            options.update(layer_channels=",".join(map(str, self.channels)))
        return options


class ImageClassifier(BaseFairseqModel):
    """fairseq model for image classification. A joint model returns the ``mean`` or ``sum`` of the members' logits."""

    stacks_members: ClassVar[bool] = True
    """Whether `build_network` can build several members as one network."""

    def __init__(self, network: ImageNetwork, joint_logits: str = "mean") -> None:
        super().__init__()
        self.network, self.joint_logits = network, joint_logits

    @classmethod
    def build_model(cls, cfg: Any, task: Any, num_members: int = 1, joint_logits: str = "mean") -> "ImageClassifier":
        """Build a single model, or a joint model of ``num_members`` members, for the images of a task."""
        if not hasattr(task, "image_shape"):
            raise AlmaError(f"{cls.__name__}: the task does not provide images; give --task alma_image_classification")
        check_options(cfg)
        network = cls.build_members(cfg, ImageKind(task.image_shape, task.num_classes), num_members)
        network.reset_parameters([torch.default_generator] * num_members)
        return ImageClassifier(network, joint_logits) if num_members > 1 else cls(network)

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
        """Read the layer sizes after growth from model options. Raises AlmaError for an invalid option."""
        return GrownLayers()

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        """Return the layer sizes of a network after growth; all members have the same layer sizes."""
        trees = [layer.gate.tree for layer in mixture_layers(network)]
        return GrownLayers(trees=tuple(trees[: len(trees) // network.num_members]))

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, K) logits for (B, C, H, W) normalized images."""
        return join_logits(self.network(images), self.joint_logits)


class ImageEnsemble(TrainedMembers, BaseFairseqModel):
    """Ensemble of trained image models as one model for evaluation.

    Args:
        members: trained models.
        weights: weight of each member's probabilities; the sum is 1.
        embedded: indices of the members whose weights are stored in the checkpoint of the ensemble.
    """

    members: Any  # an nn.ModuleList; Any because mypy does not know the class of the members

    def __init__(self, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = list(weights)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    def trained_members(self) -> Sequence[nn.Module]:
        return self.members

    def forward(self, images: Tensor) -> Tensor:
        """Return fp32 log-probabilities (B, K) for normalized images (B, C, H, W)."""
        logits = (member(images) for member in self.members)
        return log_of_mean((F.log_softmax(each.float(), dim=-1) for each in logits), self.weights)


def image_architectures() -> list[str]:
    """Return the sorted names of the registered architectures of single image models."""
    models = {name: MODEL_REGISTRY[key] for name, key in ARCH_MODEL_NAME_REGISTRY.items()}
    return sorted(name for name, kind in models.items() if isinstance(kind, type) and issubclass(kind, ImageClassifier))
