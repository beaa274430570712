import math

import pytest

from fairseq_alma.report.figures import radar
from tests.report.fakes import drawn, image_stream

pytestmark = pytest.mark.usefixtures("styled")


def draw(runs):
    return drawn(radar.draw, runs)


def shapes(axes):
    return [[float(value) for value in line.get_ydata()] for line in axes.lines]


def test_each_axis_is_a_share_of_the_largest_value(make):
    stream = image_stream(2)
    runs = [
        make("a", [0.5, 0.5], stream=stream, num_params=[100], train_flops=1e12),
        make("b", [0.25, 0.25], learner="ens", stream=stream, num_params=[400], train_flops=1e12, num_members=[2]),
    ]
    (drawing,) = draw(runs)
    single, ensemble = shapes(drawing.figure.axes[0])
    assert single == pytest.approx([1, 0.25, 0.5, 0.25, 1])
    assert ensemble == pytest.approx([0.5, 1, 1, 1, 0.5])


def test_perplexity_counts_by_its_logarithm(make):
    (drawing,) = draw([make("a", [16.0] * 4), make("b", [4.0] * 4, learner="ens")])
    first, second = shapes(drawing.figure.axes[0])
    assert (first[0], second[0]) == (1, pytest.approx(math.log(4) / math.log(16)))
    assert "logarithm" in drawing.caption


def test_a_model_that_waits_has_a_size_and_a_cost_of_predicting_from_the_beginning(make):
    stream = image_stream(4)
    (drawing,) = draw([make("a", stream=stream, num_params=[100]), make("b", stream=stream, wait=4, num_params=[100])])
    greedy, tardy = shapes(drawing.figure.axes[0])
    assert (greedy[1], greedy[3]) == (tardy[1], tardy[3]) == (1, 1)


def test_one_run_has_nothing_to_be_compared_with(make):
    assert draw([make("a")]) == []
    assert draw([make("b"), make("c", [30, 20], learner="ens")]) == []


def test_a_learner_of_extreme_cost_leaves_the_other_panels_as_they_are(make):
    stream = image_stream(4)
    costs = {"sm": 1e12, "ens": 2e12, "umix": 2e12, "gmoe": 3e12, "gens": 1e15}
    runs = [
        make(f"{learner}{wait}", learner=learner, stream=stream, wait=wait, train_flops=cost if wait == 1 else 1e12)
        for learner, cost in costs.items()
        for wait in (1, 2)
    ]
    (drawing,) = draw(runs)
    eager, tardy = (shapes(axes) for axes in drawing.figure.axes)
    assert max(shape[2] for shape in eager) == 1 and sorted(shape[2] for shape in eager)[3] < 0.01
    assert [shape[2] for shape in tardy] == [1] * 5


def test_sizes_and_waits_of_one_learner_alone_get_no_panel(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix", "gmoe") for wait in (1, 2, 5)]
    runs += [make_sized("sm", width, 1) for width in (8, 16)] + [make_sized("sm", 4, 10)]
    (drawing,) = draw(runs)
    assert [len(axes.lines) for axes in drawing.figure.axes] == [4, 4, 4]
