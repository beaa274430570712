"""``alma_vgg``: VGG19 with the same number of channels in every layer and batch norm (paper v5, Appendix B.1.2)."""

from dataclasses import dataclass, field
from typing import Sequence

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model

from fairseq_alma.errors import AlmaError
from fairseq_alma.models.alma_mlp import require_positive
from fairseq_alma.models.image_classifier import ImageClassifier
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.vgg import NUM_CONVOLUTIONS, SMALLEST_IMAGE, VGG


@dataclass
class AlmaVGGConfig(FairseqDataclass):
    """Options of a VGG network."""

    channels: int = field(default=32, metadata={"help": "feature maps of every layer; the paper: 4 to 64"})


@register_model("alma_vgg", dataclass=AlmaVGGConfig)
class AlmaVGG(ImageClassifier):
    """A VGG network."""

    @classmethod
    def build_members(
        cls, cfg: AlmaVGGConfig, image_shape: Sequence[int], num_classes: int, num_members: int
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        require_positive("--channels", cfg.channels)
        require_large_enough("alma_vgg", image_shape)
        return VGG(image_shape, num_classes, [cfg.channels] * NUM_CONVOLUTIONS, num_members)


def require_large_enough(arch: str, image_shape: Sequence[int]) -> None:
    """Raise AlmaError if nothing would be left of an image after all poolings."""
    _, height, width = image_shape
    if min(height, width) < SMALLEST_IMAGE:
        raise AlmaError(
            f"--arch {arch}: images of {height} by {width} pixels, at least {SMALLEST_IMAGE} by {SMALLEST_IMAGE} are "
            "needed; give --arch alma_mlp"
        )
