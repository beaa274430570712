import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, parse_gate_trees


def test_rows_are_numbered_choice_by_choice_breadth_first():
    tree = GateTree.from_nested([0, 1, [2, 4], 3])
    assert tree.row_expert == (0, 1, None, 3, 2, 4)
    assert [(c.start, c.stop, c.parent_row) for c in tree.choices] == [(0, 4, None), (4, 6, 2)]
    assert tree.num_experts == 5
    assert tree.num_rows == 6
    assert tree.row_of(4) == 5


def test_splitting_turns_a_leaf_into_a_choice_at_any_depth():
    tree = GateTree.flat(3).with_split(1, 3).with_split(3, 4)
    assert tree.to_nested() == [0, [1, [3, 4]], 2]


def test_a_sibling_joins_the_choice_that_its_source_belongs_to():
    tree = GateTree.from_nested([0, [1, 2]])
    assert tree.with_sibling(0, 3).to_nested() == [0, [1, 2], 3]
    assert tree.with_sibling(2, 3).to_nested() == [0, [1, 2, 3]]


def test_paths_name_every_row():
    tree = GateTree.from_nested([0, [1, [2, 3]]])
    assert tree.paths() == {(0,): 0, (1,): 1, (1, 0): 2, (1, 1): 3, (1, 1, 0): 4, (1, 1, 1): 5}


def test_only_the_plain_order_is_flat():
    assert GateTree.flat(3).is_flat
    assert not GateTree.from_nested([0, 2, 1]).is_flat
    assert not GateTree.from_nested([[0, 1]]).is_flat


def test_written_trees_read_back():
    trees = [GateTree.from_nested([0, [1, 2]]), GateTree.flat(3)]
    assert parse_gate_trees(format_gate_trees(trees), 2, 3) == trees
    assert format_gate_trees([GateTree.flat(3)]) == ""


@pytest.mark.parametrize("nested", [[0, 0], [0, 2], [], [0, []], 3])
def test_what_is_no_tree_is_refused(nested):
    with pytest.raises(AlmaError):
        GateTree.from_nested(nested)
