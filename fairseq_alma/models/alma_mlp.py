"""``alma_mlp``: a fully connected network, two hidden layers with ReLU (paper v5, Appendix B.1.1)."""

from dataclasses import dataclass, field
from typing import Sequence

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model

from fairseq_alma.errors import AlmaError
from fairseq_alma.models.image_classifier import ImageClassifier
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.mlp import MLP


@dataclass
class AlmaMLPConfig(FairseqDataclass):
    """Options of a fully connected network."""

    width: int = field(default=64, metadata={"help": "units of each hidden layer; the paper: 4 to 64"})
    hidden_layers: int = field(default=2, metadata={"help": "number of hidden layers"})


@register_model("alma_mlp", dataclass=AlmaMLPConfig)
class AlmaMLP(ImageClassifier):
    """A fully connected network."""

    @classmethod
    def build_members(
        cls, cfg: AlmaMLPConfig, image_shape: Sequence[int], num_classes: int, num_members: int
    ) -> ImageNetwork:
        """Build members in one stack; see `ImageClassifier`."""
        require_positive("--width", cfg.width)
        require_positive("--hidden-layers", cfg.hidden_layers)
        return MLP(image_shape, num_classes, cfg.width, cfg.hidden_layers, num_members)


def require_positive(option: str, value: int) -> None:
    """Raise AlmaError unless a number is at least 1."""
    if value < 1:
        raise AlmaError(f"{option} {value}: a number of at least 1 is needed")
