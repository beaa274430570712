import numpy
import pytest
from matplotlib.figure import Figure

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.report.figures.gate_tree_plot import draw_tree

EXPERTS = numpy.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
LABELS = numpy.array([3, 4, 5, 6, 6, 6, 6, 6, 6, 9])


def picture(nested, labels=LABELS):
    axes = Figure().subplots()
    draw_tree(axes, GateTree.from_nested(nested), EXPERTS, labels)
    return axes


def squares(axes):
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "s"]


def test_choices_are_squares_above_their_leaves():
    axes = picture([0, [1, 2]])
    assert sorted(squares(axes)) == [(0.75, 0), (1.5, -1)]
    circles = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert circles == [(0, -1), (1, -2), (2, -2)]


def test_leaves_say_their_share_and_the_classes_that_they_are_made_of():
    texts = [text.get_text() for text in picture([0, [1, 2]]).texts]
    assert texts == ["0", "10 %\n3", "1", "20 %\n4 5", "2", "70 %\n6 9"]


def test_classes_are_left_out_where_they_have_no_digits():
    assert "70 %" in [text.get_text() for text in picture([0, 1, 2], labels=None).texts]


@pytest.mark.parametrize("nested,num_choices", [([[0, [1, 2]]], 2), ([[[0, 1, 2]]], 1), ([0, 1, 2], 1)])
def test_a_gate_that_began_with_one_expert_has_no_choice_of_one(nested, num_choices):
    assert len(squares(picture(nested))) == num_choices


def test_a_tree_that_no_page_has_room_for_is_not_drawn():
    nested = [0, 1]
    for expert in range(2, 500):
        nested = [nested, expert]
    axes = picture(nested)
    assert not squares(axes) and axes.texts[0].get_text() == "500 experts:\ntoo many to draw"
