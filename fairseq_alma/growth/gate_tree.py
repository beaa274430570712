"""The tree of choices behind a gate, as plain Python data.

A Switch layer starts with one softmax over its experts: a *flat* tree, ``[0, 1, 2, 3]``. Splitting expert 2 into
itself and a new expert 4 turns its leaf into a choice of its own: ``[0, 1, [2, 4], 3]`` (paper v5, Appendix A). The
nested list is the tree's written form, in a model's configuration and in checkpoints.

Every child of every choice owns one row of the gate's weight matrix. Rows are numbered choice by choice, breadth
first, so that the rows of one choice are adjacent. For ``[0, 1, [2, 4], 3]``:

    row      0  1  2       3  4  5
    child    0  1  [2, 4]  3  2  4
    choice   0  0  0       0  1  1     choice 1 hangs below row 2
"""

import json
from dataclasses import dataclass
from typing import Optional, Union

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

    Attributes:
        nested: the tree as nested lists of expert numbers.
        choices: every choice, root first, parents before children.
        row_expert: for every row the expert that it leads to, or None where it leads to a further choice.
    """

    nested: tuple
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
        pending: list[tuple[Nested, Optional[int]]] = [(nested, None)]
        while pending:
            children, parent_row = pending.pop(0)
            if not isinstance(children, list) or not children:
                raise AlmaError(f"gate tree {json.dumps(nested)}: every choice must be a list of at least one child")
            start = len(row_expert)
            choices.append(Choice(start, start + len(children), parent_row))
            for row, child in enumerate(children, start):
                is_leaf = isinstance(child, int)
                row_expert.append(child if isinstance(child, int) else None)
                if not is_leaf:
                    pending.append((child, row))
        leaves = sorted(expert for expert in row_expert if expert is not None)
        if leaves != list(range(len(leaves))):
            raise AlmaError(f"gate tree {json.dumps(nested)}: experts must be 0 to n-1, each once, found {leaves}")
        return cls(_freeze(nested), tuple(choices), tuple(row_expert))

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
        return self.nested == tuple(range(self.num_experts))

    def row_of(self, expert: int) -> int:
        """Return the row that leads to an expert."""
        return self.row_expert.index(expert)

    def with_split(self, expert: int, new_expert: int) -> "GateTree":
        """Turn an expert's leaf into a choice between it and a new expert: 2 becomes [2, 4]."""
        return GateTree.from_nested(_replace(self.to_nested(), expert, [expert, new_expert]))

    def with_sibling(self, expert: int, new_expert: int) -> "GateTree":
        """Put a new expert at the end of the choice that an expert belongs to: [0, 1] becomes [0, 1, 2]."""
        return GateTree.from_nested(_add_sibling(self.to_nested(), expert, new_expert))

    def paths(self) -> dict[tuple[int, ...], int]:
        """Return the row at every path; (2, 0) is the first child of the root's third child."""
        found: dict[tuple[int, ...], int] = {}
        pending: list[tuple[Nested, tuple[int, ...]]] = [(self.to_nested(), ())]
        row = 0
        while pending:
            children, path = pending.pop(0)
            assert isinstance(children, list)
            for position, child in enumerate(children):
                found[(*path, position)] = row
                row += 1
                if isinstance(child, list):
                    pending.append((child, (*path, position)))
        return found

    def to_nested(self) -> list[Nested]:
        """Return the tree as nested lists."""
        return _thaw(self.nested)


def parse_gate_trees(text: Optional[str], num_layers: int, num_experts: Optional[int]) -> list[GateTree]:
    """Read the trees of all Switch layers from the option ``--gate-trees``.

    Args:
        text: JSON list with one nested list per Switch layer; empty for flat gates.
        num_layers: number of Switch layers.
        num_experts: number of experts that each must have.

    Raises:
        AlmaError: if the text is no such list or does not fit the two numbers.
    """
    if num_experts is None:
        raise AlmaError("--num-experts is not known yet; give it")
    if not text:
        return [GateTree.flat(num_experts) for _ in range(num_layers)]
    try:
        nested = json.loads(text)
    except json.JSONDecodeError as error:
        raise AlmaError(f"--gate-trees {text!r}: not JSON ({error}); take it from the output of alma-grow") from error
    if not isinstance(nested, list) or len(nested) != num_layers:
        raise AlmaError(f"--gate-trees {text!r}: needs a list of {num_layers} trees, one for each Switch layer")
    trees = [GateTree.from_nested(layer) for layer in nested]
    for layer, tree in enumerate(trees):
        if tree.num_experts != num_experts:
            raise AlmaError(
                f"--gate-trees: Switch layer {layer} has {tree.num_experts} experts, --num-experts says {num_experts}; "
                "give both as alma-grow printed them"
            )
    return trees


def format_gate_trees(trees: list[GateTree]) -> str:
    """Write the trees of all Switch layers as the value of ``--gate-trees``: empty if all are flat."""
    if all(tree.is_flat for tree in trees):
        return ""
    return json.dumps([tree.to_nested() for tree in trees], separators=(",", ":"))


def _freeze(nested: Nested) -> tuple:
    return tuple(_freeze(child) if isinstance(child, list) else child for child in nested)  # type: ignore[union-attr]


def _thaw(nested: tuple) -> list[Nested]:
    return [_thaw(child) if isinstance(child, tuple) else child for child in nested]


def _replace(nested: list[Nested], expert: int, replacement: Nested) -> list[Nested]:
    """Return nested lists with one leaf replaced."""
    return [
        _replace(child, expert, replacement) if isinstance(child, list) else replacement if child == expert else child
        for child in nested
    ]


def _add_sibling(nested: list[Nested], expert: int, new_expert: int) -> list[Nested]:
    """Return nested lists with a leaf appended to the list that holds another."""
    children = [_add_sibling(child, expert, new_expert) if isinstance(child, list) else child for child in nested]
    return [*children, new_expert] if expert in nested else children
