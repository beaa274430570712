"""More layers for a decoder that has learned with fewer: no output changes, because what new layers add begins at zero.

Ways in which they begin:

- ``zero``: random weights, as in a new model, but for the matrices that write to the residual stream, which are zero.
- ``last``: as the last layer of their kind, dense or Switch, but for these matrices. Behind all others, as ``zero``.
- ``interpolated``: each a copy of the layer before it, but for these matrices, spread evenly among the old layers.

A Switch model has experts in every n-th layer, so that ``interpolated`` adds whole groups of n.
"""

import re
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import has_experts

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "fc2_weight", "fc2_bias")


@dataclass(frozen=True)
class DepthGrowth:
    """Where the layers of a deeper decoder come from.

    Attributes:
        sources: for each layer the old layer whose weights it begins with; None: random ones.
        is_new: for each layer whether it begins with outputs of zero, rather than being the old layer.
        factor: what the outputs of old layers are multiplied with, so that they count as before.
    """

    sources: tuple[Optional[int], ...]
    is_new: tuple[bool, ...]
    factor: float = 1.0

    def origin(self, name: str) -> tuple[Optional[str], bool]:
        """Return the old name of a parameter, None if it is random, and whether its layer is new."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return name, False
        layer = int(match[1])
        source = self.sources[layer]
        return None if source is None else f"decoder.layers.{source}.{match[2]}", self.is_new[layer]

    def grow(self, name: str, old: Optional[Tensor], fresh: Optional[Tensor]) -> Tensor:
        """Return a parameter of the deeper model.

        Args:
            name: of it.
            old: the parameter of the old model that it comes from, if any.
            fresh: otherwise random weights for it.
        """
        _, is_new = self.origin(name)
        begun = fresh if old is None else old
        assert begun is not None
        if is_new and name.endswith(_OUTPUTS):
            return torch.zeros_like(begun)
        if old is None:
            return begun
        return old.clone() if is_new else old * self.factor if self._is_scaled(name) else old

    def grow_moment(self, name: str, field: str, old: Tensor) -> Tensor:
        """Return a moment of a parameter of an old layer: gradients are divided by what weights are multiplied with."""
        power = {"exp_avg": 1, "exp_avg_sq": 2}.get(field, 0)
        return old / self.factor**power if self._is_scaled(name) else old

    def _is_scaled(self, name: str) -> bool:
        return self.factor != 1 and _LAYER.fullmatch(name) is not None and name.endswith(_OUTPUTS)


def grow_depth(old: int, new: int, every: int, method: str, factor: float = 1.0) -> DepthGrowth:
    """Plan more layers.

    Args:
        old: number of layers.
        new: number of layers wanted.
        every: every how manieth layer has experts; 0: none.
        method: one of `LAYER_METHODS`.
        factor: see `DepthGrowth`.

    Raises:
        AlmaError: there are as many layers already, or the new ones do not fit between the old ones.
    """
    if new <= old:
        raise AlmaError(f"--layers {new}: the model has {old} layers already; give more")
    if method != "interpolated":
        sources: list[Optional[int]] = [*range(old)]
        for layer in range(old, new):
            alike = [each for each in range(old) if has_experts(each, every) == has_experts(layer, every)]
            sources.append(alike[-1] if alike and method == "last" else None)
        return DepthGrowth(tuple(sources), (False,) * old + (True,) * (new - old), factor)
    group = max(every, 1)
    if old % group or new % group:
        raise AlmaError(
            f"--layers {new}: every {group}. of the {old} layers has experts, and --method interpolated adds whole "
            f"groups of {group} to whole ones; give such a number, or --method zero"
        )
    num_groups, num_added = old // group, (new - old) // group
    sources, is_new = [], []
    for number in range(num_groups):
        copies = (number + 1) * num_added // num_groups - number * num_added // num_groups
        for copy in range(1 + copies):
            sources += range(number * group, (number + 1) * group)
            is_new += [copy > 0] * group
    return DepthGrowth(tuple(sources), tuple(is_new), factor)
