import math

import numpy
import pytest

from fairseq_alma.report.experiment import begun
from fairseq_alma.report.figures.curves import draw_curves, draw_radar, lay_out, left_out
from fairseq_alma.report.read_run import RunTable
from tests.report.fakes import drawn, image_stream, text_stream

pytestmark = pytest.mark.usefixtures("styled")


def groups_of(runs):
    return begun(RunTable.of(runs))


def sized(width):
    return {"train_options": {"--arch": "alma_mlp", "--width": str(width)}, "num_params": [width]}


def test_each_size_has_a_column(make):
    runs = [
        make(f"{learner}-{width}", learner=learner, **sized(width)) for learner in ("sm", "ens") for width in (8, 4)
    ]
    (row,) = lay_out(groups_of(runs))
    assert [panel.title for panel in row.panels] == ["mlp, width 4", "mlp, width 8"]
    assert [list(panel.groups) for panel in row.panels] == [["SM_w1", "Ens_w1"]] * 2


def test_of_many_sizes_four_that_cover_the_range_are_shown(make):
    groups = groups_of([make(f"{width}", **sized(width)) for width in (1, 2, 3, 4, 5, 6, 7)])
    (row,) = lay_out(groups)
    assert [panel.title[-1] for panel in row.panels] == ["1", "3", "5", "7"]
    assert left_out(groups) == ["mlp, width 2", "mlp, width 4", "mlp, width 6"]


def test_one_size_needs_no_title(make):
    (row,) = lay_out(groups_of([make("a", **sized(4))]))
    assert [panel.title for panel in row.panels] == [""]


def many(make):
    return groups_of(
        [
            make(f"{learner}{wait}", learner=learner, wait=wait)
            for learner in ("sm", "ens", "umix")
            for wait in (1, 2, 4)
        ]
    )


def test_a_crowded_panel_becomes_a_row_for_each_learner(make):
    rows = lay_out(many(make))
    assert [row.title for row in rows] == ["SM", "Ens", "UMix"]
    assert list(rows[1].panels[0].groups) == ["Ens_w1", "Ens_w2", "Ens_w4"]


def test_rows_may_hold_waiting_times_instead(make):
    rows = lay_out(many(make), "shown_wait")
    assert [row.title for row in rows] == ["wait 1", "wait 2", "wait 4"]
    assert list(rows[2].panels[0].groups) == ["SM_w4", "Ens_w4", "UMix_w4"]


def test_a_colour_means_a_learner_and_a_marker_a_waiting_time(make):
    runs = [make(f"{learner}{wait}", learner=learner, wait=wait) for learner in ("sm", "ens") for wait in (1, 2)]
    (row,) = lay_out(groups_of(runs))
    looks = row.styles
    assert looks["SM_w1"].colour == looks["SM_w2"].colour != looks["Ens_w1"].colour
    assert looks["SM_w1"].marker == looks["Ens_w1"].marker != looks["SM_w2"].marker


def test_all_curves_of_a_row_look_different(make):
    runs = [make(f"{lr}", train_options={"--lr": lr}) for lr in ("0.1", "0.2", "0.3")]
    runs += [make("r", replay=True), make("e", learner="ens"), make("w", wait=2), make("i", iid=2)]
    (row,) = lay_out(groups_of(runs))
    assert len({(look.colour, look.marker, look.dash) for look in row.styles.values()}) == len(runs)


def test_the_same_waiting_time_has_the_same_colour_in_all_rows(make):
    rows = lay_out(many(make))
    assert rows[0].styles["SM_w2"].colour == rows[2].styles["UMix_w2"].colour


def test_a_column_is_titled_where_its_first_panel_stands(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix") for wait in (1, 2, 5)]
    rows = lay_out(groups_of([*runs, make_sized("ens", 8, 1), make_sized("umix", 8, 1)]))
    titles = [[panel and panel.title for panel in row.panels] for row in rows]
    assert titles == [["mlp, width 4", None], ["", "mlp, width 8"], ["", ""]]


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
    (drawing,) = drawn(draw_curves, [make("a", [0.5, 0.25], stream=image_stream(5), wait=2, drop_rest=True)])
    assert stairs(drawing.figure.axes[0]) == [[90, 50, 50, 25, 25]]


def test_a_curve_ends_where_its_run_has_got_to(make):
    (drawing,) = drawn(draw_curves, [make("a", [30, 20]), make("b", [30, 20, 10, 6], learner="ens")])
    assert [len(curve) for curve in stairs(drawing.figure.axes[0])] == [2, 4]
    assert "not complete" in drawing.caption


def test_an_untrained_model_that_is_far_above_does_not_press_the_curves_flat(make):
    stream = text_stream(4, vocab_size=50_000)
    (drawing,) = drawn(
        draw_curves, [make("a", [30, 20], wait=2, stream=stream), make("b", [40, 30, 20, 18], stream=stream)]
    )
    (axes,) = drawing.figure.axes
    assert axes.get_ylim()[1] < 60
    assert axes.get_legend().get_texts()[-1].get_text() == "untrained: 50,000"
    assert "ends below the untrained model" in drawing.caption


def test_a_note_on_the_untrained_model_stands_clear_of_the_titles_of_panels(make):
    stream = text_stream(4, vocab_size=50_000)
    runs = [make(f"{width}", [30, 20], wait=2, stream=stream, train_options={"--decoder-embed-dim": width})
            for width in ("64", "96")]  # fmt: skip
    (drawing,) = drawn(draw_curves, runs)
    assert [axes.get_title() for axes in drawing.figure.axes] == ["width 64", "width 96"]
    assert not any(axes.texts for axes in drawing.figure.axes)
    assert drawing.figure.axes[-1].get_legend().get_texts()[-1].get_text() == "untrained: 50,000"


def test_one_run_that_waits_for_nothing_needs_no_note(make):
    (drawing,) = drawn(draw_curves, [make("a", stream=text_stream(4, vocab_size=50_000))])
    assert "untrained" not in str([text.get_text() for text in drawing.figure.axes[0].get_legend().get_texts()])


def test_seeds_are_a_mean_with_a_band(make):
    (drawing,) = drawn(draw_curves, [make("a", [30, 20, 10, 6]), make("b", [34, 22, 12, 8], seed=2)])
    (axes,) = drawing.figure.axes
    assert stairs(axes) == [[32, 21, 11, 7]]
    assert len(axes.collections) == 1
    assert "standard deviation" in drawing.caption


def test_the_iid_control_is_a_star_without_a_curve(make):
    (drawing,) = drawn(draw_curves, [make("a", [24.0], iid=3, learner="ens"), make("b", learner="ens")])
    (axes,) = drawing.figure.axes
    assert len(stairs(axes)) == 1
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert [list(data) for data in star.get_data()] == [[2], [24.0]]


def test_axes_name_what_they_show_with_units(make):
    (text,) = drawn(draw_curves, [make("a")])
    (images,) = drawn(draw_curves, [make("b", stream=image_stream())])
    assert (text.figure.axes[0].get_ylabel(), images.figure.axes[0].get_ylabel()) == (
        "test perplexity",
        "test error (%)",
    )
    assert text.figure.axes[0].get_xlabel() == "arrival (mega-batch)"
    assert [tick.get_text() for tick in text.figure.axes[0].get_xticklabels()][:2] == ["$t_{0}$", "$t_{1}$"]


def test_panels_of_all_sizes_share_their_axes(make):
    runs = [
        make(f"{width}", [0.9 / width] * 10, stream=image_stream(), num_params=[width],
             train_options={"--arch": "alma_mlp", "--width": str(width)})
        for width in (2, 4)
    ]  # fmt: skip
    (drawing,) = drawn(draw_curves, runs)
    small, large = drawing.figure.axes
    assert (small.get_title(), large.get_title()) == ("mlp, width 2", "mlp, width 4")
    assert small.get_ylim() == large.get_ylim()


def test_each_column_has_its_arrivals_below_its_lowest_panel(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix") for wait in (1, 2, 5)]
    (drawing,) = drawn(draw_curves, [*runs, make_sized("sm", 8, 1)])
    drawing.figure.draw_without_rendering()
    labelled = [axes for axes in drawing.figure.axes if axes.axison and axes.get_xlabel()]
    assert len(labelled) == 2
    for axes in labelled:
        assert any(tick.label1.get_visible() and tick.label1.get_text() for tick in axes.xaxis.get_major_ticks())


def shapes(axes):
    return [[float(value) for value in line.get_ydata()] for line in axes.lines]


def test_each_axis_is_a_share_of_the_largest_value(make):
    stream = image_stream(2)
    runs = [
        make("a", [0.5, 0.5], stream=stream, num_params=[100], train_flops=1e12),
        make("b", [0.25, 0.25], learner="ens", stream=stream, num_params=[400], train_flops=1e12, num_members=[2]),
    ]
    (drawing,) = drawn(draw_radar, runs)
    single, ensemble = shapes(drawing.figure.axes[0])
    assert single == pytest.approx([1, 0.25, 0.5, 0.25, 1])
    assert ensemble == pytest.approx([0.5, 1, 1, 1, 0.5])


def test_perplexity_counts_by_its_logarithm(make):
    (drawing,) = drawn(draw_radar, [make("a", [16.0] * 4), make("b", [4.0] * 4, learner="ens")])
    first, second = shapes(drawing.figure.axes[0])
    assert (first[0], second[0]) == (1, pytest.approx(math.log(4) / math.log(16)))
    assert "logarithm" in drawing.caption


def test_a_model_that_waits_has_a_size_and_a_cost_of_predicting_from_the_beginning(make):
    stream = image_stream(4)
    (drawing,) = drawn(
        draw_radar, [make("a", stream=stream, num_params=[100]), make("b", stream=stream, wait=4, num_params=[100])]
    )
    greedy, tardy = shapes(drawing.figure.axes[0])
    assert (greedy[1], greedy[3]) == (tardy[1], tardy[3]) == (1, 1)


def test_one_run_has_nothing_to_be_compared_with(make):
    assert drawn(draw_radar, [make("a")]) == []
    assert drawn(draw_radar, [make("b"), make("c", [30, 20], learner="ens")]) == []


def test_a_learner_of_extreme_cost_leaves_the_other_panels_as_they_are(make):
    stream = image_stream(4)
    costs = {"sm": 1e12, "ens": 2e12, "umix": 2e12, "gmoe": 3e12, "gens": 1e15}
    runs = [
        make(f"{learner}{wait}", learner=learner, stream=stream, wait=wait, train_flops=cost if wait == 1 else 1e12)
        for learner, cost in costs.items()
        for wait in (1, 2)
    ]
    (drawing,) = drawn(draw_radar, runs)
    eager, tardy = (shapes(axes) for axes in drawing.figure.axes)
    assert max(shape[2] for shape in eager) == 1 and sorted(shape[2] for shape in eager)[3] < 0.01
    assert [shape[2] for shape in tardy] == [1] * 5


def test_sizes_and_waits_of_one_learner_alone_get_no_panel(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix", "gmoe") for wait in (1, 2, 5)]
    runs += [make_sized("sm", width, 1) for width in (8, 16)] + [make_sized("sm", 4, 10)]
    (drawing,) = drawn(draw_radar, runs)
    assert [len(axes.lines) for axes in drawing.figure.axes] == [4, 4, 4]
