import math

import pytest

from fairseq_alma.report.figures import matrix
from tests.report.fakes import drawn, text_stream
from tests.report.test_matrix import HELD_OUT, TRAINING

pytestmark = pytest.mark.usefixtures("styled")


def test_a_figure_has_three_maps_with_the_losses_in_their_fields(make):
    extras = [{"matrix": {"held_out": own, "training": other}} for own, other in zip(HELD_OUT, TRAINING, strict=True)]
    (drawing,) = drawn(matrix.draw, [make("a", stream=text_stream(3), stage_extras=extras), make("b", seed=2)])
    maps = drawing.figure.axes
    assert [axes.get_title() for axes in maps] == ["held out", "trained on", "difference: memorised"]
    assert maps[0].texts[1].get_text() == f"{math.log(2) * 5.5:.2f}"
    assert len(maps[2].texts) == 9


def test_nothing_is_drawn_where_nothing_was_tested(make):
    assert drawn(matrix.draw, [make("a", stream=text_stream(3))]) == []
