import math

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures.maps import draw_matrix, draw_usage
from tests.report.fakes import drawn, image_stream, text_stream
from tests.report.test_matrix import HELD_OUT, TRAINING

pytestmark = pytest.mark.usefixtures("styled")
GROWING = [{"expert_usage": [[0.25, 0.75]]}, {"expert_usage": [[0.25, 0.25, 0.5]]}]


def test_areas_stand_above_each_other_and_hold_until_the_next_update(make):
    run = make("a", learner="gmoe", stream=image_stream(4), wait=2, stage_extras=GROWING)
    (drawing,) = drawn(draw_usage, [run])
    (axes,) = drawing.figure.axes
    tops = [[float(value) for value in line.get_ydata()] for line in axes.lines]
    assert tops == [[25, 25, 25], [100, 50, 50], [100, 100, 100]]
    assert list(axes.lines[0].get_xdata()) == [1, 3, 4]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]
    assert axes.get_ylabel() == "share of test set (%)"


def test_each_layer_has_a_panel(make):
    usage = [{"expert_usage": [[0.5, 0.5], [1.0, 0.0]]}] * 4
    (drawing,) = drawn(draw_usage, [make("a", learner="gmoe", stream=image_stream(4), stage_extras=usage)])
    assert [axes.get_title() for axes in drawing.figure.axes] == ["layer 0", "layer 1"]


def test_learners_that_grow_come_first_and_what_is_left_out_is_counted(make):
    fixed = [{"expert_usage": [[0.5, 0.5]]}] * 4
    stream = image_stream(4)
    runs = [make(f"m{wait}", learner="moe", wait=wait, stream=stream, stage_extras=fixed) for wait in (1, 2, 3, 4)]
    runs.append(make("g", learner="gmoe", stream=stream, num_experts=[2, 3], stage_extras=GROWING * 2))
    (drawing,) = drawn(draw_usage, runs)
    assert len(drawing.figure.axes) == 4
    assert drawing.caption.index("gMoE_w1") < drawing.caption.index("MoE_w2")
    assert "1 more" in drawing.caption


def test_of_hundreds_of_updates_some_are_drawn(make):
    usage = [{"expert_usage": [[0.5, 0.5]]}] * 300
    (drawing,) = drawn(draw_usage, [make("a", learner="gmoe", stream=image_stream(300), stage_extras=usage)])
    places = list(drawing.figure.axes[0].lines[0].get_xdata())
    assert len(places) < 120 and places[-2:] == [299, 300]


def test_nothing_is_drawn_without_several_experts(make):
    single = [{"expert_usage": [[1.0]]}] * 4
    assert drawn(draw_usage, [make("a"), make("b", learner="gmoe", stream=image_stream(4), stage_extras=single)]) == []


@pytest.mark.parametrize("damage", ["x", [0.5], [["a"]], {"0": [1.0]}])
def test_damaged_shares_are_named(damage, make):
    run = make("a", learner="gmoe", stream=image_stream(4), stage_extras=[{"expert_usage": damage}])
    with pytest.raises(AlmaError, match=r"a: expert_usage after arrival t0 is damaged"):
        drawn(draw_usage, [run])


def test_a_figure_has_three_maps_with_the_losses_in_their_fields(make):
    extras = [{"matrix": {"held_out": own, "training": other}} for own, other in zip(HELD_OUT, TRAINING, strict=True)]
    (drawing,) = drawn(draw_matrix, [make("a", stream=text_stream(3), stage_extras=extras), make("b", seed=2)])
    maps = drawing.figure.axes
    assert [axes.get_title() for axes in maps] == ["held out", "trained on", "difference: memorised"]
    assert maps[0].texts[1].get_text() == f"{math.log(2) * 5.5:.2f}"
    assert len(maps[2].texts) == 9


def test_nothing_is_drawn_where_nothing_was_tested(make):
    assert drawn(draw_matrix, [make("a", stream=text_stream(3))]) == []
