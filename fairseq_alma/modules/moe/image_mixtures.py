"""The networks of the image study with mixtures of experts in their layers (paper v5, section 5).

The fully connected network has its two hidden layers as mixtures, the VGG network all sixteen convolutions. They have
one member: trees of two members grow apart, so that there is nothing to compute together.

Letters: B images, K classes.
"""

import math
from typing import Optional, Sequence

from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.member_layers import MemberLinear
from fairseq_alma.modules.images.vgg import NUM_CONVOLUTIONS, VGG
from fairseq_alma.modules.moe.mixture_block import MixtureBlock, MixtureConv, MixtureLinear


class MixtureMLP(ImageNetwork):
    """A fully connected network whose hidden layers are mixtures.

    Args:
        image_shape: (C, H, W).
        num_classes: K.
        width: units of each expert.
        trees: of each hidden layer.
        gate: ``soft`` or ``hard``.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(num_members=1)
        sizes = [math.prod(image_shape)] + [width] * len(trees)
        self.blocks = nn.ModuleList(
            MixtureLinear(before, after, tree, gate)
            for before, after, tree in zip(sizes[:-1], sizes[1:], trees, strict=True)
        )
        self.classifier = MemberLinear(1, width, num_classes)

    def forward(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        x = _only_member(images).flatten(1)
        for block in self.blocks:
            x = block(x, generator)
        return self.classifier(x)


class MixtureVGG(VGG):
    """A VGG network whose convolutions are mixtures.

    Args:
        image_shape: (C, H, W); height and width of at least 16.
        num_classes: K.
        channels: of each expert.
        trees: of each of the sixteen convolutions.
        gate: ``soft`` or ``hard``.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, channels: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(
            image_shape,
            num_classes,
            [channels] * NUM_CONVOLUTIONS,
            make_block=lambda layer, before, after: MixtureConv(before, after, trees[layer], gate),
        )

    def forward(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        return super().forward(_only_member(images), generator)


def mixture_blocks(network: nn.Module) -> list[MixtureBlock]:
    """Return the mixtures of a network, in order."""
    return [module for module in network.modules() if isinstance(module, MixtureBlock)]


def _only_member(images: Tensor) -> Tensor:
    return images[0] if images.dim() == 5 else images
