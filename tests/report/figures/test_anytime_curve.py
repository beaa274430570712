import numpy
import pytest

from fairseq_alma.report.figures import anytime_curve
from tests.report.fakes import drawn, image_stream, text_stream

pytestmark = pytest.mark.usefixtures("styled")


def draw(runs):
    return drawn(anytime_curve.draw, runs)


def stairs(axes):
    """The value of each staircase just after each whole number."""
    lines = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    found = []
    for line in lines:
        places, values = line.get_data()
        whole = numpy.arange(int(places[-1]))
        found.append([float(value) for value in values[numpy.searchsorted(places, whole, side="right") - 1]])
    return found


def test_waiting_is_drawn_as_steps_of_the_last_update(make):
    (drawing,) = draw([make("a", [0.5, 0.25], stream=image_stream(5), wait=2, drop_rest=True)])
    assert stairs(drawing.figure.axes[0]) == [[90, 50, 50, 25, 25]]


def test_a_curve_ends_where_its_run_has_got_to(make):
    (drawing,) = draw([make("a", [30, 20]), make("b", [30, 20, 10, 6], learner="ens")])
    assert [len(curve) for curve in stairs(drawing.figure.axes[0])] == [2, 4]
    assert "not complete" in drawing.caption


def test_an_untrained_model_that_is_far_above_does_not_press_the_curves_flat(make):
    stream = text_stream(4, vocab_size=50_000)
    (drawing,) = draw([make("a", [30, 20], wait=2, stream=stream), make("b", [40, 30, 20, 18], stream=stream)])
    (axes,) = drawing.figure.axes
    assert axes.get_ylim()[1] < 60
    assert axes.get_legend().get_texts()[-1].get_text() == "untrained: 50,000"
    assert "ends below the untrained model" in drawing.caption


def test_a_note_on_the_untrained_model_stands_clear_of_the_titles_of_panels(make):
    stream = text_stream(4, vocab_size=50_000)
    runs = [make(f"{width}", [30, 20], wait=2, stream=stream, train_options={"--decoder-embed-dim": width})
            for width in ("64", "96")]  # fmt: skip
    (drawing,) = draw(runs)
    assert [axes.get_title() for axes in drawing.figure.axes] == ["width 64", "width 96"]
    assert not any(axes.texts for axes in drawing.figure.axes)
    assert drawing.figure.axes[-1].get_legend().get_texts()[-1].get_text() == "untrained: 50,000"


def test_one_run_that_waits_for_nothing_needs_no_note(make):
    (drawing,) = draw([make("a", stream=text_stream(4, vocab_size=50_000))])
    assert "untrained" not in str([text.get_text() for text in drawing.figure.axes[0].get_legend().get_texts()])


def test_seeds_are_a_mean_with_a_band(make):
    (drawing,) = draw([make("a", [30, 20, 10, 6]), make("b", [34, 22, 12, 8], seed=2)])
    (axes,) = drawing.figure.axes
    assert stairs(axes) == [[32, 21, 11, 7]]
    assert len(axes.collections) == 1
    assert "standard deviation" in drawing.caption


def test_the_iid_control_is_a_star_without_a_curve(make):
    (drawing,) = draw([make("a", [24.0], iid=3, learner="ens"), make("b", learner="ens")])
    (axes,) = drawing.figure.axes
    assert len(stairs(axes)) == 1
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert [list(data) for data in star.get_data()] == [[2], [24.0]]


def test_axes_name_what_they_show_with_units(make):
    (text,) = draw([make("a")])
    (images,) = draw([make("b", stream=image_stream())])
    assert (text.figure.axes[0].get_ylabel(), images.figure.axes[0].get_ylabel()) == (
        "test perplexity",
        "test error (%)",
    )
    assert text.figure.axes[0].get_xlabel() == "arrival (mega-batch)"
    assert [tick.get_text() for tick in text.figure.axes[0].get_xticklabels()][:2] == ["$t_{0}$", "$t_{1}$"]


def test_nothing_is_drawn_before_a_first_update(make):
    assert draw([make("a", num_stages=0)]) == []


def test_panels_of_all_sizes_share_their_axes(make):
    runs = [
        make(f"{width}", [0.9 / width] * 10, stream=image_stream(), num_params=[width],
             train_options={"--arch": "alma_mlp", "--width": str(width)})
        for width in (2, 4)
    ]  # fmt: skip
    (drawing,) = draw(runs)
    small, large = drawing.figure.axes
    assert (small.get_title(), large.get_title()) == ("mlp, width 2", "mlp, width 4")
    assert small.get_ylim() == large.get_ylim()


def test_each_column_has_its_arrivals_below_its_lowest_panel(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix") for wait in (1, 2, 5)]
    (drawing,) = draw([*runs, make_sized("sm", 8, 1)])
    drawing.figure.draw_without_rendering()
    labelled = [axes for axes in drawing.figure.axes if axes.axison and axes.get_xlabel()]
    assert len(labelled) == 2
    for axes in labelled:
        assert any(tick.label1.get_visible() and tick.label1.get_text() for tick in axes.xaxis.get_major_ticks())
