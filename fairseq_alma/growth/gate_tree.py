"""The tree of choices behind a gate, as plain Python data.

A layer of experts starts with one softmax over its experts: a *flat* tree, ``[0, 1, 2, 3]``. Splitting expert 2 into
itself and a new expert 4 turns its leaf into a choice of its own: ``[0, 1, [2, 4], 3]`` (paper v5, Appendix A). The
nested list is the tree's written form, in a model's configuration and in checkpoints.

Every child of every choice owns one row of the gate's weight matrix. Rows are numbered choice by choice, breadth
first, so that the rows of one choice are adjacent. For ``[0, 1, [2, 4], 3]``:

    row      0  1  2       3  4  5
    child    0  1  [2, 4]  3  2  4
    choice   0  0  0       0  1  1     choice 1 hangs below row 2
"""

import json
import sys
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

from fairseq_alma.errors import AlmaError

Nested = Union[int, list["Nested"]]


@dataclass(frozen=True)
class Choice:
    """One softmax of the tree, over rows ``start`` to ``stop`` (exclusive), reached through ``parent_row``."""

    start: int
    stop: int
    parent_row: Optional[int]


@dataclass(frozen=True)
class GateTree:
    """Choices and leaves of a gate.

    Nothing here calls itself: after 500 growth steps an expert may lie below 500 choices.

    Attributes:
        choices: every choice, root first, parents before children.
        row_expert: for every row the expert that it leads to, or None where it leads to a further choice.
    """

    choices: tuple[Choice, ...]
    row_expert: tuple[Optional[int], ...]

    @classmethod
    def flat(cls, num_experts: int) -> "GateTree":
        """Build the tree of one softmax over ``num_experts`` experts."""
        return cls.from_nested(list(range(num_experts)))

    @classmethod
    def from_nested(cls, nested: Nested) -> "GateTree":
        """Build a tree from nested lists of expert numbers.

        Raises:
            AlmaError: if it is no list, has a choice without children, or its leaves are not 0 to n-1, each once.
        """
        choices: list[Choice] = []
        row_expert: list[Optional[int]] = []
        pending: deque[tuple[Nested, Optional[int]]] = deque([(nested, None)])
        while pending:
            children, parent_row = pending.popleft()
            if not isinstance(children, list) or not children:
                raise AlmaError(f"gate tree {_shown(nested)}: every choice must be a list of at least one child")
            start = len(row_expert)
            choices.append(Choice(start, start + len(children), parent_row))
            for row, child in enumerate(children, start):
                if type(child) is int:  # not a bool, which JSON has too
                    row_expert.append(child)
                else:
                    row_expert.append(None)
                    pending.append((child, row))
        leaves = sorted(expert for expert in row_expert if expert is not None)
        if leaves != list(range(len(leaves))):
            raise AlmaError(f"gate tree {_shown(nested)}: experts must be 0 to n-1, each once")
        return cls(tuple(choices), tuple(row_expert))

    @property
    def num_experts(self) -> int:
        """Number of leaves."""
        return sum(expert is not None for expert in self.row_expert)

    @property
    def num_rows(self) -> int:
        """Number of rows of the gate's weight matrix."""
        return len(self.row_expert)

    @property
    def is_flat(self) -> bool:
        """Whether row i leads to expert i, as in a plain Switch layer."""
        return self.row_expert == tuple(range(self.num_rows))

    def row_of(self, expert: int) -> int:
        """Return the row that leads to an expert."""
        return self.row_expert.index(expert)

    def with_split(self, expert: int, new_expert: int) -> "GateTree":
        """Turn an expert's leaf into a choice between it and a new expert: 2 becomes [2, 4]."""
        lists, (choice, position) = self._lists(), self._place_of(expert)
        lists[choice][position] = [expert, new_expert]
        return GateTree.from_nested(lists[0])

    def with_sibling(self, expert: int, new_expert: int) -> "GateTree":
        """Put a new expert at the end of the choice that an expert belongs to: [0, 1] becomes [0, 1, 2]."""
        lists, (choice, _) = self._lists(), self._place_of(expert)
        lists[choice].append(new_expert)
        return GateTree.from_nested(lists[0])

    def paths(self) -> dict[tuple[int, ...], int]:
        """Return the row at every path; (2, 0) is the first child of the root's third child."""
        found: list[tuple[int, ...]] = []
        for choice in self.choices:
            above = () if choice.parent_row is None else found[choice.parent_row]
            found += [(*above, position) for position in range(choice.stop - choice.start)]
        return {path: row for row, path in enumerate(found)}

    def to_nested(self) -> list[Nested]:
        """Return the tree as nested lists."""
        return self._lists()[0]

    def _place_of(self, expert: int) -> tuple[int, int]:
        """Return the number of the choice that an expert belongs to, and its position in it."""
        row = self.row_of(expert)
        choice = bisect_right(self.choices, row, key=lambda choice: choice.start) - 1
        return choice, row - self.choices[choice].start

    def _lists(self) -> list[list[Nested]]:
        """Return every choice as a list that holds those below it."""
        lists: list[list[Any]] = [list(self.row_expert[choice.start : choice.stop]) for choice in self.choices]
        places = [(here, position) for here in lists for position in range(len(here))]  # of each row
        for choice, here in zip(self.choices, lists, strict=True):
            if choice.parent_row is not None:
                above, position = places[choice.parent_row]
                above[position] = here
        return lists


def has_experts(layer: int, every: int) -> bool:
    """Return whether a layer, from 0, has experts: with every 2nd these are 1, 3, 5, …; 0: no layer has."""
    return every > 0 and (layer + 1) % every == 0


def trees_of_layers(options: Any) -> list[Optional[GateTree]]:
    """Return for every layer of a Switch model its gate's tree, or None where the layer is dense.

    Args:
        options: as `SwitchOptions` declares them.

    Raises:
        AlmaError: as `parse_gate_trees`.
    """
    is_switch = [has_experts(layer, options.moe_freq) for layer in range(options.decoder_layers)]
    if options.gate_trees and not any(is_switch):
        raise AlmaError(
            f"--gate-trees is given but --moe-freq {options.moe_freq} leaves no Switch layer; drop one of the two"
        )
    trees = iter(parse_gate_trees(options.gate_trees, sum(is_switch), options.num_experts))
    return [next(trees) if each else None for each in is_switch]


def parse_gate_trees(text: Optional[str], num_layers: int, num_experts: Optional[int]) -> list[GateTree]:
    """Read the trees of all layers of experts from the option ``--gate-trees``.

    Args:
        text: JSON list with one nested list per layer; empty for flat gates.
        num_layers: number of layers of experts.
        num_experts: number of experts that each must have.

    Raises:
        AlmaError: if the text is no such list or does not fit the two numbers.
    """
    if num_experts is None:
        raise AlmaError("--num-experts is not known yet; give it")
    if not text:
        return [GateTree.flat(num_experts) for _ in range(num_layers)]
    shown = _beginning(text)
    try:
        nested = json.loads(text)
    except json.JSONDecodeError as error:
        raise AlmaError(f"--gate-trees '{shown}': not JSON ({error}); take it as growth printed it") from error
    except RecursionError as error:
        raise AlmaError(f"--gate-trees: {_TOO_DEEP}") from error
    if not isinstance(nested, list) or len(nested) != num_layers:
        raise AlmaError(f"--gate-trees '{shown}': needs a list of {num_layers} trees, one for each layer of experts")
    trees = [GateTree.from_nested(layer) for layer in nested]
    for layer, tree in enumerate(trees):
        if tree.num_experts != num_experts:
            raise AlmaError(
                f"--gate-trees: layer {layer} has {tree.num_experts} experts, --num-experts says {num_experts}; give "
                "both as growth printed them"
            )
    return trees


def nested_gate_trees(trees: Sequence[GateTree]) -> Optional[list[list[Nested]]]:
    """Return the trees of all layers of experts as nested lists, as ``stage.json`` has them: None if all are flat."""
    return None if all(tree.is_flat for tree in trees) else [tree.to_nested() for tree in trees]


def format_gate_trees(trees: Sequence[GateTree]) -> str:
    """Write the trees of all layers of experts as the value of ``--gate-trees``: empty if all are flat.

    Raises:
        AlmaError: a tree is nested deeper than JSON can be.
    """
    nested = nested_gate_trees(trees)
    try:
        return "" if nested is None else json.dumps(nested, separators=(",", ":"))
    except RecursionError as error:
        raise AlmaError(f"gate trees: {_TOO_DEEP}") from error


_TOO_DEEP = f"choices nested deeper than JSON can be, about {sys.getrecursionlimit():,} levels; grow in fewer steps"


def _shown(nested: Any) -> str:
    """Return the beginning of a tree as JSON, for messages."""
    try:
        return _beginning(json.dumps(nested))
    except RecursionError:
        return "(nested too deep to be shown)"


def _beginning(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
