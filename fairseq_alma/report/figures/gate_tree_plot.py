"""A gating tree as a picture: choices as red squares, experts as leaves."""

from typing import Optional

import numpy
from matplotlib.axes import Axes

from fairseq_alma.growth.gate_tree import GateTree, Nested
from fairseq_alma.report.figures import style

MAIN_CLASS = 0.1  # share of an expert's images from which on a class is named
MOST_LEAVES = 50  # of a tree that a page has room for
MOST_NAMED = 10  # leaves that leave room for what goes to them


def draw_tree(axes: Axes, tree: GateTree, experts: numpy.ndarray, labels: Optional[numpy.ndarray]) -> None:
    """Draw a tree with its root on top.

    Args:
        axes: empty ones.
        tree: the gate.
        experts: the expert that each image goes to, (N,), integers; gives the leaves' shares.
        labels: class of each image, (N,), integers; None: leave out which classes go to a leaf.
    """
    axes.set_axis_off()
    if tree.num_experts > MOST_LEAVES:
        axes.text(0.5, 0.5, f"{tree.num_experts} experts:\ntoo many to draw", ha="center", transform=axes.transAxes)
        return
    nested = _without_single_children(tree.to_nested())
    leaves = _leaves(nested)
    columns = {expert: float(column) for column, expert in enumerate(leaves)}
    depth = _depth(nested)
    _draw_choice(axes, nested, 0, columns)
    for expert in leaves:
        _describe_leaf(axes, expert, (columns[expert], -_level(nested, expert)), experts, labels, len(leaves))
    axes.set_xlim(-0.6, len(leaves) - 0.4)
    axes.set_ylim(-depth - 0.95, 0.3)


def _draw_choice(axes: Axes, nested: Nested, level: int, columns: dict[int, float]) -> float:
    """Draw a choice with all below it and return its column; of a leaf, return the column alone."""
    if isinstance(nested, int):
        return columns[nested]
    below = [_draw_choice(axes, child, level + 1, columns) for child in nested]
    middle = (min(below) + max(below)) / 2
    for column in below:
        axes.plot([middle, column], [-level, -level - 1], color=style.TREE, linewidth=1.2, zorder=1)
    axes.plot([middle], [-level], marker="s", color=style.TREE, markersize=6, zorder=2)
    return middle


def _describe_leaf(
    axes: Axes,
    expert: int,
    place: tuple[float, float],
    experts: numpy.ndarray,
    labels: Optional[numpy.ndarray],
    num_leaves: int,
) -> None:
    """Draw an expert's leaf, and below it what goes to it."""
    colour = style.expert_colour(expert)
    axes.plot([place[0]], [place[1]], marker="o", markersize=13, color=colour, zorder=2)
    axes.text(*place, str(expert), ha="center", va="center", fontsize=7, color=style.ink_on(colour), zorder=3)
    own = experts == expert
    lines = [f"{100 * own.mean():.0f} %"]
    if labels is not None and own.any():
        classes, counts = numpy.unique(labels[own], return_counts=True)
        main = [str(label) for label, count in zip(classes, counts, strict=True) if count >= MAIN_CLASS * own.sum()]
        lines += [" ".join(main[start : start + 3]) for start in range(0, len(main), 3)]
    if num_leaves <= MOST_NAMED:
        axes.annotate(
            "\n".join(lines), place, xytext=(0, -10), textcoords="offset points", ha="center", va="top", fontsize=6.5,
            linespacing=1.25,
        )  # fmt: skip


def _without_single_children(nested: Nested) -> Nested:
    """Leave out choices that have nothing to choose: a gate that began with one expert has one as its root."""
    if isinstance(nested, int):
        return nested
    if len(nested) == 1 and isinstance(nested[0], list):
        return _without_single_children(nested[0])
    return [_without_single_children(child) for child in nested]


def _leaves(nested: Nested) -> list[int]:
    return [nested] if isinstance(nested, int) else [leaf for child in nested for leaf in _leaves(child)]


def _depth(nested: Nested) -> int:
    return 0 if isinstance(nested, int) else 1 + max(_depth(child) for child in nested)


def _level(nested: Nested, expert: int) -> int:
    """Return how many choices lead to an expert."""
    if isinstance(nested, int):
        return 0
    return 1 + next(_level(child, expert) for child in nested if expert in _leaves(child))
