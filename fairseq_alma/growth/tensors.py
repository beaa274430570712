"""A growth step on plain tensors: stacked experts, gate rows, and the optimizer's state of both."""

from typing import Callable, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.growth.plan import LayerGrowth

EXPERT_TENSORS = ("experts.fc1_weight", "experts.fc1_bias", "experts.fc2_weight", "experts.fc2_bias")
GATE_TENSOR = "gate.weight"

Filler = Callable[[Tensor], object]
"""Sets the content of one new slice, given in fp32."""


def gather_slices(old: Tensor, source: Sequence[Optional[int]], fill: Filler) -> Tensor:
    """Stack slices of a tensor in a new order.

    Args:
        old: (E, …).
        source: for each slice of the result the slice of ``old``, or None.
        fill: sets the slices that have no source.

    Returns:
        (len(source), …), same precision.
    """
    new = old.new_empty((len(source), *old.shape[1:]))
    for position, origin in enumerate(source):
        if origin is not None:
            new[position] = old[origin]
        else:
            content = torch.empty(old.shape[1:], dtype=torch.float32)
            fill(content)
            new[position] = content
    return new


def grow_tensor(name: str, old: Tensor, growth: LayerGrowth, generator: torch.Generator, noise: float = 0.0) -> Tensor:
    """Grow one parameter of a Switch layer.

    Args:
        name: its name within the layer, one of `EXPERT_TENSORS` or `GATE_TENSOR`.
        old: its value.
        growth: the plan.
        generator: of new weights and noise.
        noise: standard deviation of normal noise on copied gate rows.
    """
    if name != GATE_TENSOR:
        return gather_slices(old, growth.expert_source, lambda expert: _initialize(expert, generator))
    num_rows, model_dim = growth.new.num_rows, old.size(1)
    bound = (6 / (num_rows + model_dim)) ** 0.5  # as a new gate of this size starts: Xavier's uniform distribution
    new = gather_slices(old, growth.row_source, lambda row: nn.init.uniform_(row, -bound, bound, generator))
    for row in growth.copied_rows if noise > 0 else ():
        new[row] += noise * torch.randn(model_dim, generator=generator).to(new.dtype)
    return new


def grow_state(name: str, old: Tensor, growth: LayerGrowth) -> Tensor:
    """Grow the optimizer's moments of one parameter: copies keep their source's, new slices start from zero."""
    source = growth.row_source if name == GATE_TENSOR else growth.expert_source
    return gather_slices(old, source, nn.init.zeros_)


def _initialize(content: Tensor, generator: torch.Generator) -> None:
    """Initialise one new expert's weights or bias as a new layer has them."""
    if content.dim() == 1:
        content.zero_()
    else:
        nn.init.xavier_uniform_(content, generator=generator)
