import random
from types import SimpleNamespace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateNode, GateTree, format_gate_trees, parse_gate_trees, trees_of_layers


def test_rows_are_numbered_choice_by_choice_breadth_first():
    tree = GateTree.from_nested([0, 1, [2, 4], 3])
    assert tree.row_expert == (0, 1, None, 3, 2, 4)
    assert tree.nodes == (GateNode(0, 4, None), GateNode(4, 6, 2))
    assert (tree.num_experts, tree.num_rows, tree.row_expert.index(4)) == (5, 6, 5)
    assert GateTree.flat(3).is_flat  # one choice, in ascending order
    assert not GateTree.from_nested([0, 2, 1]).is_flat
    assert not GateTree.from_nested([[0, 1]]).is_flat
    assert GateTree.from_nested([0, [1, 2]]) != GateTree.from_nested([[0, 1], 2])


def test_formatted_trees_parse_to_equal_trees_also_after_five_hundred_growth_steps():
    assert parse_gate_trees(format_gate_trees([deep_tree(500)]), 1, 501) == [deep_tree(500)]
    trees = [GateTree.from_nested([0, [1, 2]]), GateTree.flat(3)]
    assert parse_gate_trees(format_gate_trees(trees), 2, 3) == trees
    assert format_gate_trees([GateTree.flat(3)]) == ""


@pytest.mark.parametrize("nested", [[0, 0], [0, 2], [], [0, []], 3, [0, 1.0], [0, "1"], [0, True], [1, 2], [0, None]])
def test_an_invalid_tree_is_rejected(nested):
    with pytest.raises(AlmaError, match="gate tree"):
        GateTree.from_nested(nested)


def grow_nested(children, expert, new, method):
    """Grow nested lists recursively, as a reference."""
    grown = []
    for child in children:
        if isinstance(child, list):
            grown.append(grow_nested(child, expert, new, method))
        else:
            grown.append([expert, new] if child == expert and method == "split" else child)
    return [*grown, new] if method == "copy" and expert in children else grown


@pytest.mark.parametrize("seed", range(20))
def test_growth_of_a_tree_equals_growth_of_nested_lists_and_each_row_has_a_path(seed):
    generator = random.Random(seed)
    tree, nested = GateTree.flat(1), [0]
    for new in range(1, generator.randint(1, 30)):
        expert, method = generator.randrange(new), generator.choice(["split", "copy"])
        tree, nested = tree.with_copy(expert, new, method), grow_nested(nested, expert, new, method)
    assert tree.to_nested() == nested
    assert GateTree.from_nested(nested) == tree and hash(GateTree.from_nested(nested)) == hash(tree)
    for path, row in tree.paths().items():
        node = nested
        for position in path:
            node = node[position]
        assert tree.row_expert[row] == (None if isinstance(node, list) else node)
    assert sorted(tree.paths().values()) == list(range(tree.num_rows))


def deep_tree(depth):
    nested = [0, 1]
    for expert in range(2, depth + 1):
        nested = [nested, expert]
    return GateTree.from_nested(nested)


def test_a_tree_may_be_two_thousand_choices_deep():
    tree = deep_tree(2000)
    grown = tree.with_copy(0, 2001, "split").with_copy(2001, 2002, "copy")
    assert (len(grown.nodes), grown.num_experts, grown.num_rows) == (2001, 2003, 4003)
    assert max(len(path) for path in grown.paths()) == 2001
    assert grown.nodes[-1] == GateNode(4000, 4003, grown.nodes[-1].parent_row)
    assert [grown.row_expert[row] for row in range(4000, 4003)] == [0, 2001, 2002]
    assert GateTree.from_nested(tree.to_nested()) == tree != grown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0,1]", r"--gate-trees \[\[0,1\]: not JSON"),
        ("[" * 200_000 + "]" * 200_000, "…: not JSON"),
        ("3", "expected a list of 2 trees"),
        ("[[0,1],[0,1,2]]", "tree 1 has 3 experts, but --num-experts is 2"),
        ("[[0,1],[0,0]]", "each exactly once"),
        ("[" + "[0,1]," * 400 + "[0,1]]", "…: expected a list of 2 trees"),
    ],
)
def test_invalid_gate_trees_are_rejected_with_one_short_line(text, message):
    with pytest.raises(AlmaError, match=message) as error:
        parse_gate_trees(text, 2, 2)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_gate_trees_of_a_model_without_switch_layers_are_rejected():
    options = SimpleNamespace(gate_trees="[[0, 1]]", moe_freq=0, decoder_layers=4, num_experts=2)
    with pytest.raises(AlmaError, match="--gate-trees: --moe-freq 0 gives no Switch layer among 4"):
        trees_of_layers(options)
    options.moe_freq = 4
    assert trees_of_layers(options) == [None, None, None, GateTree.flat(2)]
