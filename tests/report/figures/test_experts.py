import pytest

from fairseq_alma.report.figures.experts import draw
from tests.report.fakes import image_stream

pytestmark = pytest.mark.usefixtures("styled")


def test_experts_are_counted_over_all_models_that_predict_together(make):
    runs = [make("a", num_experts=[8]), make("b", learner="ens", num_experts=[4], num_members=[4])]
    (drawing,) = draw(runs)
    assert [list(line.get_xdata()) for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 4][::2] == [
        [8] * 4,
        [16] * 4,
    ]


def test_a_growing_learner_moves_to_the_right(make):
    (drawing,) = draw([make("a", [30, 20, 10, 6], learner="gmoe", num_experts=[4, 6, 8, 12])])
    line = drawing.figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([4, 6, 8, 12], [30, 25, 20, 16.5])


def test_the_papers_results_stand_below(make):
    (drawing,) = draw([make("a", learner="gmoe", num_experts=[4, 6])], paper=True)
    assert len(drawing.figure.axes) == 2
    assert max(max(line.get_xdata()) for line in drawing.figure.axes[1].lines) == 16


def test_nothing_is_drawn_where_all_have_equally_many_experts_or_on_images(make):
    assert draw([make("a"), make("b", wait=2)]) == []
    assert draw([make("c", learner="gmoe", num_experts=[1, 2], stream=image_stream())]) == []
