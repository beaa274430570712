"""More layers, and wider ones, for a decoder that has learned with fewer and narrower ones.

No output changes through more layers, because what new ones add begins at zero. Ways in which they begin:

- ``zero``: random weights, as in a new model, but for the matrices that write to the residual stream, which are zero.
- ``last``: as the last layer of their kind, dense or Switch, but for these matrices. Behind all others, as ``zero``.
- ``interpolated``: each a copy of the layer before it, but for these matrices, spread evenly among the old layers.

A Switch model has experts in every n-th layer, so that ``interpolated`` adds whole groups of n.

In wider layers units are copied, and what reads the copies shares. A layer norm keeps its mean and variance where every
unit of the residual stream is copied equally often, so that the model dimension grows to whole multiples; hidden units
of feed-forward layers and experts to any number. Attention gets more heads of the same width: the scale of its products
stays. Whatever writes units is copied, biases too; whatever reads them is split among the copies in unequal parts that
sum to the whole, for equal ones would get equal gradients and stay copies for ever (Net2Net, Chen et al. 2016).

Letters: M model dim, F feed-forward dim, k how many times M grows.
"""

import re
from dataclasses import dataclass
from typing import Optional, Sequence
from zlib import crc32

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


SPREAD = 0.5
"""Standard deviation of the parts that copies get, as a multiple of an even one."""
POSITIONS = "decoder.embed_positions.weight"
_NORM, _LAST_NORM = re.compile(r".*_layer_norm\.(weight|bias)"), re.compile(r"decoder\.layer_norm\.(weight|bias)")
_AXES = (  # of which name -> which of the last axes grow, whether the last one is split, and what it is multiplied with
    (re.compile(r".*(embed_tokens|output_projection)\.weight"), ("M",), False, "tokens"),
    (re.compile(re.escape(POSITIONS)), ("M",), False, ""),
    (_LAST_NORM, ("M",), False, "last_norm"),
    (_NORM, ("M",), False, ""),
    (re.compile(r".*qkv_proj\.weight"), ("3M", "M"), True, "reads"),
    (re.compile(r".*qkv_proj\.bias"), ("3M",), False, ""),
    (re.compile(r".*out_proj\.weight"), ("M", "M"), True, "writes"),
    (re.compile(r".*(out_proj\.|fc2[._])bias"), ("M",), False, "writes"),
    (re.compile(r".*fc1[._]weight"), ("F", "M"), True, "reads"),
    (re.compile(r".*fc1[._]bias"), ("F",), False, ""),
    (re.compile(r".*fc2[._]weight"), ("M", "F"), True, "writes"),
    (re.compile(r".*gate\.weight"), ("M",), True, "reads"),
)


@dataclass(frozen=True)
class WidthGrowth:
    """How a decoder becomes wider.

    Attributes:
        embed: M before and after.
        ffn: F before and after.
        seed: of the unequal parts.
        tokens: how many times larger the factor of embeddings becomes.
        reads: likewise, of what layer norms hand to matrices; see `maximal_update.UpdateFactors`.
        writes: likewise, of what is added to the residual stream.
        adds_positions: whether positions become learned ones, for sinusoids of another width are others.
    """

    embed: tuple[int, int]
    ffn: tuple[int, int]
    seed: int
    tokens: float = 1.0
    reads: float = 1.0
    writes: float = 1.0
    adds_positions: bool = False

    def origin(self, name: str) -> tuple[Optional[str], bool]:
        """Return the old name of a parameter, None if it has none, and whether it is of a new layer: never."""
        return None if self.adds_positions and name == POSITIONS else name, False

    def grow(self, name: str, old: Optional[Tensor], fresh: Optional[Tensor]) -> Tensor:
        """Return a parameter of the wider model.

        Args:
            name: of it.
            old: the parameter of the old model.
            fresh: of positions that become learned ones, their values.
        """
        if old is None:
            assert fresh is not None
            return fresh
        axes, is_split, factor = self._plan(name)
        if not axes:
            return old
        grown = self._gather(old, axes) * factor
        if is_split:
            grown *= self._parts(name, grown.shape, axes[-1])
        return grown

    def grow_moment(self, name: str, field: str, old: Tensor) -> Tensor:
        """Return a moment of Adam's: of n copies that count as one each has the n-th part of its gradient.

        What copies are multiplied with in the sum, their gradients are divided by; parts are taken as even.
        """
        axes, is_split, factor = self._plan(name)
        power = {"exp_avg": 1, "exp_avg_sq": 2}.get(field, 0)
        grown = self._gather(old, axes)
        for place, axis in enumerate(axes):
            if not (is_split and place == len(axes) - 1):
                source = self._source(axis)
                copies = source.bincount()[source].to(grown)
                grown = grown / copies.view(-1, *[1] * (len(axes) - 1 - place)) ** power
        return grown / factor**power

    def _plan(self, name: str) -> tuple[tuple[str, ...], bool, float]:
        """Return which of the last axes grow, whether the last one is split, and the factor."""
        times = self.embed[1] / self.embed[0]
        factors = {
            "": 1.0,
            "tokens": 1 / self.tokens,
            "reads": 1 / self.reads,
            "writes": 1 / self.writes,
            "last_norm": self.tokens / self.reads / times,
        }
        for pattern, axes, is_split, which in _AXES:
            if pattern.fullmatch(name):
                return axes, is_split, factors[which]
        return (), False, 1.0

    def _source(self, axis: str) -> Tensor:
        """Return for each unit of an axis of the wider model the old one: 0, 1, …, n - 1, 0, 1, …"""
        old, new = self.ffn if axis == "F" else self.embed
        units = torch.arange(new) % old
        return torch.cat([units + part * old for part in range(3)]) if axis == "3M" else units

    def _gather(self, old: Tensor, axes: tuple[str, ...]) -> Tensor:
        for place, axis in enumerate(axes):
            source = self._source(axis)
            if len(source) != old.size(place - len(axes)):
                old = old.index_select(place - len(axes), source)
        return old

    def _parts(self, name: str, shape: torch.Size, axis: str) -> Tensor:
        """Return the part that each copy gets: those of one old unit sum to 1, for the model as for its average."""
        source = self._source(axis)
        # A generator for each name: whatever grows in whatever order, its parts are the same.
        generator = torch.Generator().manual_seed(self.seed + crc32(name.encode()))
        return unequal_parts(source, shape, generator)


def unequal_parts(source: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return the part of a weight that each copy of a unit gets: those of one old unit sum to 1.

    Args:
        source: (I) int64, the old unit of each unit that is read.
        shape: (…, I) of the weight.
        generator: of the parts, on the CPU.

    Returns:
        (…, I); a scalar 1 where no unit has copies.
    """
    copies = source.bincount()
    if copies.max() == 1:
        return torch.ones(())
    drawn = torch.randn(*shape, generator=generator)
    sums = torch.zeros(*shape[:-1], len(copies)).index_add_(-1, source, drawn)
    return drawn.sub_((sums / copies)[..., source]).mul_(SPREAD).add_(1).div_(copies[source])


def require_wider(embed: tuple[int, int], ffn: tuple[int, int]) -> None:
    """Raise AlmaError unless a decoder can grow from the first of M and F to the second.

    Args:
        embed: M before and after.
        ffn: F before and after.
    """
    (old, new), (hidden, more) = embed, ffn
    if new % old:
        raise AlmaError(
            f"--embed-dim {new}: the model has {old}, and layer norms stay as they are where each unit is copied "
            f"equally often; give a multiple, such as {2 * old}"
        )
    if more < hidden:
        raise AlmaError(f"--ffn-dim {more}: the model has {hidden}, and a model only grows; give more")
    if (old, hidden) == (new, more):
        raise AlmaError(f"--embed-dim {new} --ffn-dim {more}: the model has them already; give more")
