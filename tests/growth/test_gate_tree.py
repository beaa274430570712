import random
from types import SimpleNamespace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import Choice, GateTree, format_gate_trees, parse_gate_trees, trees_of_layers


def test_rows_are_numbered_choice_by_choice_breadth_first():
    tree = GateTree.from_nested([0, 1, [2, 4], 3])
    assert tree.row_expert == (0, 1, None, 3, 2, 4)
    assert [(c.start, c.stop, c.parent_row) for c in tree.choices] == [(0, 4, None), (4, 6, 2)]
    assert tree.num_experts == 5
    assert tree.num_rows == 6
    assert tree.row_of(4) == 5


def test_only_the_plain_order_is_flat_and_only_the_same_form_is_equal():
    assert GateTree.from_nested([0, [1, 2]]) != GateTree.from_nested([[0, 1], 2])
    assert GateTree.from_nested([0, 1, 2]) != GateTree.from_nested([0, [1, 2]])
    assert GateTree.flat(3).is_flat
    assert not GateTree.from_nested([0, 2, 1]).is_flat
    assert not GateTree.from_nested([[0, 1]]).is_flat


def test_written_trees_read_back_also_after_five_hundred_growth_steps():
    assert parse_gate_trees(format_gate_trees([deep_tree(500)]), 1, 501) == [deep_tree(500)]
    trees = [GateTree.from_nested([0, [1, 2]]), GateTree.flat(3)]
    assert parse_gate_trees(format_gate_trees(trees), 2, 3) == trees
    assert format_gate_trees([GateTree.flat(3)]) == ""


@pytest.mark.parametrize("nested", [[0, 0], [0, 2], [], [0, []], 3, [0, 1.0], [0, "1"], [0, True], [1, 2], [0, None]])
def test_what_is_no_tree_is_refused(nested):
    with pytest.raises(AlmaError, match="gate tree"):
        GateTree.from_nested(nested)


def random_tree(num_experts, generator):
    """Return a tree that grew from one expert by splits and siblings, and the same growth on nested lists."""
    tree, nested = GateTree.flat(1), [0]
    for new in range(1, num_experts):
        expert = generator.randrange(new)
        if generator.random() < 0.6:
            tree, nested = tree.with_split(expert, new), replaced(nested, expert, [expert, new])
        else:
            tree, nested = tree.with_sibling(expert, new), with_sibling(nested, expert, new)
    return tree, nested


def replaced(nested, expert, replacement):
    return [
        replaced(child, expert, replacement) if isinstance(child, list) else replacement if child == expert else child
        for child in nested
    ]


def with_sibling(nested, expert, new):
    children = [with_sibling(child, expert, new) if isinstance(child, list) else child for child in nested]
    return [*children, new] if expert in nested else children


@pytest.mark.parametrize("seed", range(20))
def test_growth_equals_growth_of_the_nested_lists_and_paths_lead_to_every_row(seed):
    generator = random.Random(seed)
    tree, nested = random_tree(generator.randint(1, 30), generator)
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
    grown = tree.with_split(0, 2001).with_sibling(2001, 2002)
    assert (len(grown.choices), grown.num_experts, grown.num_rows) == (2001, 2003, 4003)
    assert max(len(path) for path in grown.paths()) == 2001
    assert grown.choices[-1] == Choice(4000, 4003, grown.choices[-1].parent_row)
    assert [grown.row_expert[row] for row in range(4000, 4003)] == [0, 2001, 2002]
    assert GateTree.from_nested(tree.to_nested()) == tree != grown


def test_a_tree_too_deep_for_json_is_refused_in_one_line():
    text = "[" * 200_000 + "]" * 200_000
    with pytest.raises(AlmaError, match="--gate-trees: choices nested deeper than JSON can be"):
        parse_gate_trees(text, 1, 4)
    with pytest.raises(AlmaError, match="gate trees: choices nested deeper than JSON can be"):
        format_gate_trees([deep_tree(20_000)])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[0,1]", r"'\[\[0,1\]': not JSON"),
        ("[[0,1]]", "needs a list of 2 trees"),
        ("3", "needs a list of 2 trees"),
        ("[[0,1],[0,1,2]]", "layer 1 has 3 experts, --num-experts says 2"),
        ("[[0,1],[0,0]]", "each once"),
        ("[" + "[0,1]," * 400 + "[0,1]]", "…': needs a list of 2 trees"),
    ],
)
def test_written_trees_that_do_not_fit_are_named_in_one_short_line(text, named):
    with pytest.raises(AlmaError, match=named) as error:
        parse_gate_trees(text, 2, 2)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_trees_without_a_layer_of_experts_are_refused():
    options = SimpleNamespace(gate_trees="[[0, 1]]", moe_freq=0, decoder_layers=4, num_experts=2)
    with pytest.raises(AlmaError, match="--gate-trees is given but --moe-freq 0 leaves no Switch layer"):
        trees_of_layers(options)
    options.moe_freq = 4
    assert trees_of_layers(options) == [None, None, None, GateTree.flat(2)]
