"""The fully connected network of the MNIST study: two hidden layers with ReLU (paper v5, section 5 and Appendix B.1.1).

Letters: N members, B images, D pixels of an image, K classes.
"""

import itertools
import math
from typing import Sequence

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.member_layers import MemberLinear


class MLP(ImageNetwork):
    """Fully connected layers.

    Args:
        image_shape: (C, H, W).
        num_classes: K.
        width: neurons of each hidden layer.
        num_hidden: hidden layers.
        num_members: N.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, num_hidden: int = 2, num_members: int = 1
    ) -> None:
        super().__init__(num_members)
        sizes = [math.prod(image_shape)] + [width] * num_hidden + [num_classes]
        self.layers = nn.ModuleList(
            MemberLinear(num_members, before, after) for before, after in itertools.pairwise(sizes)
        )

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        *hidden, last = self.layers
        x = images.flatten(-3)
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)
