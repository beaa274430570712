"""Gate trees: each inner node is a softmax over its children, and each leaf is an expert.

The initial gate of a layer is one softmax over the experts, a *flat* tree: ``[0, 1, 2, 3]``. A split of expert 2 into
expert 2 and new expert 4 replaces leaf 2 with an inner node: ``[0, 1, [2, 4], 3]`` (paper v5, appendix A).
Configurations and checkpoints contain such nested lists.

Each child of an inner node has one row in the weight matrix of the gate. Rows are numbered node by node, breadth first,
so that the rows of a node are adjacent. For ``[0, 1, [2, 4], 3]``:

    row      0  1  2       3  4  5
    child    0  1  [2, 4]  3  2  4
    node     0  0  0       0  1  1     node 1 is reached through row 2
"""

import json
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Sequence, Union

from fairseq_alma.errors import AlmaError

Nested = Union[int, list["Nested"]]


class GateNode(NamedTuple):
    """Softmax over gate rows ``start`` to ``stop`` - 1; row ``parent_row`` leads to the node; None: root."""

    start: int
    stop: int
    parent_row: Optional[int]


@dataclass(frozen=True)
class GateTree:
    """Gate tree of a layer: each inner node is a softmax over its children, and each leaf is an expert.

    No method is recursive, because the path to an expert may have 500 nodes after 500 growth steps.

    Attributes:
        nodes: all inner nodes, root first, parents before children.
        row_expert: for each row, the expert that the row leads to; None: the row leads to an inner node.
    """

    nodes: tuple[GateNode, ...]
    row_expert: tuple[Optional[int], ...]

    @classmethod
    def flat(cls, num_experts: int) -> "GateTree":
        """Return the flat tree, which has one softmax over all experts."""
        return cls.from_nested([*range(num_experts)])

    @classmethod
    def from_nested(cls, nested: Nested) -> "GateTree":
        """Return the gate tree for nested lists of expert numbers.

        Raises:
            AlmaError: an inner node is empty or not a list, or the n experts are not numbered 0 to n-1.
        """
        nodes: list[GateNode] = []
        row_expert: list[Optional[int]] = []
        pending: deque[tuple[Nested, Optional[int]]] = deque([(nested, None)])
        while pending:
            children, parent_row = pending.popleft()
            if not isinstance(children, list) or not children:
                raise AlmaError(f"gate tree {_shorten(nested)}: each inner node must be a non-empty list")
            start = len(row_expert)
            nodes.append(GateNode(start, start + len(children), parent_row))
            for row, child in enumerate(children, start):
                is_expert = type(child) is int  # JSON booleans are instances of int
                row_expert.append(child if is_expert else None)  # type: ignore[arg-type]
                pending.extend([] if is_expert else [(child, row)])
        experts = sorted(expert for expert in row_expert if expert is not None)
        if experts != [*range(len(experts))]:
            raise AlmaError(f"gate tree {_shorten(nested)}: expert numbers must be 0 to n-1, each exactly once")
        return cls(tuple(nodes), tuple(row_expert))

    @property
    def num_experts(self) -> int:
        return sum(expert is not None for expert in self.row_expert)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the gate's weight matrix."""
        return len(self.row_expert)

    @property
    def is_flat(self) -> bool:
        """Return whether the tree is flat: row i of the gate belongs to expert i, as in a plain Switch layer."""
        return self.row_expert == tuple(range(self.num_rows))

    def with_copy(self, expert: int, new_expert: int, method: str) -> "GateTree":
        """Return the tree with ``new_expert`` added as a copy of ``expert``.

        For expert 2 and new expert 4, ``split`` replaces 2 with [2, 4], and ``copy`` replaces [0, 2] with [0, 2, 4].
        """
        row, nodes = self.row_expert.index(expert), self._lists()
        number = bisect_right(self.nodes, row, key=lambda node: node.start) - 1
        if method == "split":
            nodes[number][row - self.nodes[number].start] = [expert, new_expert]
        else:
            nodes[number].append(new_expert)
        return GateTree.from_nested(nodes[0])

    def paths(self) -> dict[tuple[int, ...], int]:
        """Return a dict from path to row. Path (2, 0) leads to the first child of the third child of the root."""
        found: list[tuple[int, ...]] = []
        for node in self.nodes:
            parent = () if node.parent_row is None else found[node.parent_row]
            found += [(*parent, position) for position in range(node.stop - node.start)]
        return {path: row for row, path in enumerate(found)}

    def to_nested(self) -> list[Nested]:
        """Return the tree as nested lists of expert numbers, such as ``[0, 1, [2, 4], 3]``."""
        return self._lists()[0]

    def _lists(self) -> list[list[Nested]]:
        """Return the nested list of each inner node, in the order of ``nodes``."""
        lists: list[list[Any]] = [list(self.row_expert[node.start : node.stop]) for node in self.nodes]
        # For each row: the list that contains the child of the row, and the position in this list.
        positions = [(children, position) for children in lists for position in range(len(children))]
        for node, children in zip(self.nodes, lists, strict=True):
            if node.parent_row is not None:
                parent, position = positions[node.parent_row]
                parent[position] = children
        return lists


def has_experts(layer: int, every: int) -> bool:
    """Return whether a layer (numbered from 0) has experts. ``every`` 2 selects layers 1, 3, 5, …; 0 selects none."""
    return every > 0 and (layer + 1) % every == 0


def trees_of_layers(options: Any) -> list[Optional[GateTree]]:
    """Return the gate tree of each layer of a Switch model; None for a dense layer.

    Args:
        options: values of the options in `SwitchOptions` and `ExpertOptions`.

    Raises:
        AlmaError: ``--gate-trees`` is invalid or conflicts with another option.
    """
    is_switch = [has_experts(layer, options.moe_freq) for layer in range(options.decoder_layers)]
    if options.gate_trees and not any(is_switch):
        raise AlmaError(
            f"--gate-trees: --moe-freq {options.moe_freq} gives no Switch layer among {options.decoder_layers} layers; "
            "remove --gate-trees"
        )
    trees = iter(parse_gate_trees(options.gate_trees, sum(is_switch), options.num_experts))
    return [next(trees) if each else None for each in is_switch]


def parse_gate_trees(text: Optional[str], num_layers: int, num_experts: int) -> list[GateTree]:
    """Return the gate trees of all layers of experts, parsed from the value of ``--gate-trees``.

    Args:
        text: JSON list with one nested list per layer of experts; empty or None: flat gates.
        num_layers: required number of trees.
        num_experts: required number of experts in each tree.

    Raises:
        AlmaError: the text is invalid, or has a wrong number of trees or experts.
    """
    if not text:
        return [GateTree.flat(num_experts)] * num_layers
    try:
        nested = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise AlmaError(f"--gate-trees {_shorten(text)}: not JSON ({error}); copy the output of alma-grow") from error
    if not isinstance(nested, list) or len(nested) != num_layers:
        raise AlmaError(
            f"--gate-trees {_shorten(text)}: expected a list of {num_layers} trees, one for each layer of experts; "
            "copy the output of alma-grow"
        )
    trees = [GateTree.from_nested(layer) for layer in nested]
    for layer, tree in enumerate(trees):
        if tree.num_experts != num_experts:
            raise AlmaError(
                f"--gate-trees: tree {layer} has {tree.num_experts} experts, but --num-experts is {num_experts}; "
                "copy both options from the output of alma-grow"
            )
    return trees


def nested_gate_trees(trees: Sequence[GateTree]) -> Optional[list[list[Nested]]]:
    """Return the gate trees of all layers as nested lists, as in ``stage.json``; None if all trees are flat."""
    return None if all(tree.is_flat for tree in trees) else [tree.to_nested() for tree in trees]


def format_gate_trees(trees: Sequence[GateTree]) -> str:
    """Return the gate trees of all layers as the value of ``--gate-trees``; empty if all trees are flat."""
    nested = nested_gate_trees(trees)
    return "" if nested is None else json.dumps(nested, separators=(",", ":"))


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
