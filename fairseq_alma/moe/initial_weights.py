"""Initial weights that layers of every kind draw alike."""

import math

from torch import Generator, Tensor, nn


def draw_as_linear(weight: Tensor, bias: Tensor, generator: Generator) -> None:
    """Draw a linear map's (O, I) weight and (O) bias in place as ``torch.nn.Linear`` does, uniform in ±1 / sqrt(I)."""
    bound = 1 / math.sqrt(weight.size(-1))
    nn.init.uniform_(weight, -bound, bound, generator=generator)
    nn.init.uniform_(bias, -bound, bound, generator=generator)
