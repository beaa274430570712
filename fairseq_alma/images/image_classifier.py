"""Base of the image models: a network of N members side by side; a single model has one.

A subclass builds its network from its options. ``alma-stream`` trains networks; fairseq's commands train and test the
models around them.

Letters: N members, B images, C channels, H and W height and width, K classes.
"""

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from torch import Generator, Tensor, nn

from fairseq_alma.checkpoints.ensemble_file import TrainedMembers, log_of_mean
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees
from fairseq_alma.images.networks import ImageKind, ImageNetwork, SideBySide, join_logits
from fairseq_alma.learners.learner import Growth
from fairseq_alma.training.fairseq_options import check_options


@dataclass(frozen=True)
class GrownLayers:
    """What growth changes in each layer of a network; empty for an architecture that does not grow.

    Attributes:
        trees: the gate's tree of each mixture.
        channels: of each convolution.
    """

    trees: tuple[GateTree, ...] = ()
    channels: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        """Experts of each mixture; 1 for a network without mixtures."""
        return self.trees[0].num_experts if self.trees else 1

    def options(self) -> dict[str, Any]:
        """Return it as options of the model for checkpoints; `ImageClassifier.read_grown` reads them.

        Raises:
            AlmaError: a tree is nested deeper than JSON can be.
        """
        options: dict[str, Any] = {}
        if self.trees:
            options.update(num_experts=self.num_experts, gate_trees=format_gate_trees(self.trees))
        if self.channels:
            options.update(layer_channels=",".join(map(str, self.channels)))
        return options


@dataclass(frozen=True)
class GrowthData:
    """The data that a growth step may use.

    Attributes:
        examples: returns the stage's training images, (B, C, H, W) and normalised, and their (B) labels.
        valid: the same of its validation set.
        batch_size: images of an update.
    """

    examples: Callable[[], tuple[Tensor, Tensor]]
    valid: tuple[Tensor, Tensor]
    batch_size: int


class ImageClassifier(BaseFairseqModel):
    """A model that classifies images; with several members, by the ``mean`` or the ``sum`` of their logits."""

    stacks_members: ClassVar[bool] = True
    """Whether one network holds several members, rather than one after the other."""

    def __init__(self, network: ImageNetwork, joint_logits: str = "mean") -> None:
        super().__init__()
        self.network, self.joint_logits = network, joint_logits

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "ImageClassifier":
        return cls.build_joint(cfg, task, num_members=1)

    @classmethod
    def build_joint(cls, cfg: Any, task: Any, num_members: int, joint_logits: str = "mean") -> "ImageClassifier":
        """Build models that predict as one, by the ``mean`` or ``sum`` of their logits, for the images of a task."""
        if not hasattr(task, "image_shape"):
            raise AlmaError(f"{cls.__name__} classifies images; give --task alma_image_classification")
        check_options(cfg)
        network = cls.build_members(cfg, ImageKind(task.image_shape, task.num_classes), num_members)
        network.reset_parameters([torch.default_generator] * num_members)
        return ImageClassifier(network, joint_logits) if num_members > 1 else cls(network)

    @classmethod
    def build_members(
        cls, cfg: Any, images: ImageKind, num_members: int, grown: Optional[GrownLayers] = None
    ) -> ImageNetwork:
        """Build members side by side, without initial weights.

        Args:
            cfg: the options of one of them.
            images: what they classify.
            num_members: N.
            grown: what growth has changed; None: what the options say of it.

        Raises:
            AlmaError: the options do not go with each other or with the images.
        """
        grown = cls.read_grown(cfg) if grown is None else grown
        if cls.stacks_members or num_members == 1:
            return cls.build_network(cfg, images, grown, num_members)
        return SideBySide([cls.build_network(cfg, images, grown, 1) for _ in range(num_members)])

    @classmethod
    def build_network(cls, cfg: Any, images: ImageKind, grown: GrownLayers, num_members: int) -> ImageNetwork:
        """Build one network of N members, of one where members do not stack; see `build_members`."""
        raise NotImplementedError

    @classmethod
    def read_grown(cls, cfg: Any) -> GrownLayers:
        """Read what growth has changed from the options of a model. Raises AlmaError if they are invalid."""
        return GrownLayers()

    @classmethod
    def grown_layers(cls, network: ImageNetwork) -> GrownLayers:
        """Return what growth has changed of a network, the same for all its members."""
        return GrownLayers()

    @classmethod
    def check_growth(cls, cfg: Any, images: ImageKind, growth: Growth) -> None:
        """Raise AlmaError if a network of these options cannot grow so."""

    @classmethod
    def grow(
        cls, network: ImageNetwork, growth: Growth, cfg: Any, data: GrowthData, generator: Generator
    ) -> tuple[ImageNetwork, int]:
        """Carry out a growth step.

        Args:
            network: of one member, trained.
            growth: what is added.
            cfg: the options of the network before any growth.
            data: of the stage.
            generator: on the CPU.

        Returns:
            The network, which may be the same one, and the operations of the step that count as training.
        """
        raise NotImplementedError

    @classmethod
    def build_ensemble(
        cls, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]
    ) -> "ImageEnsemble":
        """Build an ensemble of trained models, which need not be of one class; see `ImageEnsemble`."""
        return ImageEnsemble(members, weights, embedded)

    def forward(self, images: Tensor) -> Tensor:
        """Classify (B, C, H, W) normalised images. Returns (B, K) logits."""
        return join_logits(self.network(images), self.joint_logits)


class ImageEnsemble(TrainedMembers, BaseFairseqModel):
    """Several trained image models as one, for every stock command that does not train.

    Args:
        members: the models; they map (B, C, H, W) images to (B, K) logits.
        weights: of each member, at least 0, their sum is 1.
        embedded: members whose weights are in the ensemble's own checkpoint.
    """

    members: Any  # an nn.ModuleList, which hides from mypy what is in it

    def __init__(self, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = list(weights)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    build_ensemble = ImageClassifier.build_ensemble  # its members may be ensembles themselves

    def trained_members(self) -> Sequence[nn.Module]:
        return self.members

    def forward(self, images: Tensor) -> Tensor:
        """Classify (B, C, H, W) normalised images. Returns (B, K) log-probabilities in fp32, which serve as logits."""
        logits = (member(images) for member in self.members)
        return log_of_mean((F.log_softmax(each.float(), dim=-1) for each in logits), self.weights)


def image_architectures() -> list[str]:
    """Return the names of the registered architectures of single image models, in order."""
    models = {name: MODEL_REGISTRY[key] for name, key in ARCH_MODEL_NAME_REGISTRY.items()}
    return sorted(name for name, kind in models.items() if isinstance(kind, type) and issubclass(kind, ImageClassifier))
