"""What image models have in common: a network of N members side by side, of which one is a single model.

A subclass says how its network is built from its options. The ``alma-stream`` back end trains networks; fairseq's
commands train and test the models around them.
"""

from typing import Any, Mapping, Optional, Protocol, Sequence

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from torch import Generator, Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.models.image_ensemble import ImageEnsemble
from fairseq_alma.modules.images.image_network import ImageNetwork, SideBySide


class ImageTask(Protocol):
    """What a model needs to know of its task.

    Attributes:
        image_shape: (C, H, W).
        num_classes: K.
    """

    image_shape: Sequence[int]
    num_classes: int


class ImageClassifier(BaseFairseqModel):
    """A model that classifies images; with several members, by the mean of their logits.

    Args:
        network: its members.
    """

    def __init__(self, network: ImageNetwork) -> None:
        super().__init__()
        self.network = network

    @classmethod
    def build_model(cls, cfg: Any, task: ImageTask) -> "ImageClassifier":
        """Build a single model, with weights drawn from torch's global generator."""
        return cls.build_joint(cfg, task, num_members=1)

    @classmethod
    def build_joint(cls, cfg: Any, task: ImageTask, num_members: int) -> "ImageClassifier":
        """Build models that predict as one, by the mean of their logits."""
        if not hasattr(task, "image_shape"):
            raise AlmaError(f"{cls.__name__} classifies images; give --task alma_image_classification")
        network = cls.build_members(cfg, task.image_shape, task.num_classes, num_members)
        network.reset_parameters([torch.default_generator] * num_members)
        return ImageClassifier(network) if num_members > 1 else cls(network)

    @classmethod
    def build_members(cls, cfg: Any, image_shape: Sequence[int], num_classes: int, num_members: int) -> ImageNetwork:
        """Build members side by side, without initial weights.

        Args:
            cfg: the options of one of them.
            image_shape: (C, H, W).
            num_classes: K.
            num_members: N.

        Raises:
            AlmaError: the options do not go with each other or with the images.
        """
        if num_members == 1:
            return cls.build_network(cfg, image_shape, num_classes)
        return SideBySide([cls.build_network(cfg, image_shape, num_classes) for _ in range(num_members)])

    @classmethod
    def build_network(cls, cfg: Any, image_shape: Sequence[int], num_classes: int) -> ImageNetwork:
        """Build one member, without initial weights; see `build_members`."""
        raise NotImplementedError

    @classmethod
    def options_of(cls, network: ImageNetwork) -> Mapping[str, Any]:
        """Return the options that growth has changed, so that a network of this form can be built again."""
        return {}

    @classmethod
    def build_ensemble(
        cls, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]
    ) -> ImageEnsemble:
        """Build an ensemble of trained models, which need not be of one class; see `ImageEnsemble`."""
        return ImageEnsemble(members, weights, embedded)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Load weights, as every fairseq model does.

        Raises:
            AlmaError: a weight has another shape than here.
        """
        here = self.state_dict()
        for name, tensor in state_dict.items():
            if name in here and tensor.shape != here[name].shape:
                raise AlmaError(
                    f"{name} is {tuple(tensor.shape)} in the checkpoint, {tuple(here[name].shape)} is needed for the "
                    "images of this stream; give the stream that the model was trained on"
                )
        super().load_state_dict(state_dict, strict, model_cfg, args)

    def forward(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Classify (B, C, H, W) normalised images. Returns (B, K) logits."""
        return self.network(images, generator).mean(dim=0)


def image_architectures() -> list[str]:
    """Return the names of the registered architectures of single models of images, in order."""
    names = (name for name, key in ARCH_MODEL_NAME_REGISTRY.items() if _classifies_images(MODEL_REGISTRY[key]))
    return sorted(names)


def _classifies_images(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, ImageClassifier)
