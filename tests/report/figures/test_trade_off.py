import pytest

from fairseq_alma.report.figures.trade_off import draw
from tests.report.fakes import image_stream, text_stream

pytestmark = pytest.mark.usefixtures("styled")


def marks(axes):
    """Places of the full markers."""
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axes.lines
        if len(line.get_xdata()) == 1 and line.get_markersize() > 6 and line.get_clip_on()
    ]


def legend(drawing):
    return [text.get_text() for text in drawing.figure.legends[0].get_texts()]


def test_images_are_placed_by_cumulative_error_compute_and_memory(make):
    run = make("a", [0.5, 0.25], stream=image_stream(4), wait=2, num_params=[100, 300], train_flops=3e12)
    (drawing,) = draw([run])
    compute, memory = drawing.figure.axes
    assert marks(compute) == [(12, pytest.approx(90 + 50 + 50 + 25))]
    assert marks(memory) == [(3 * 100 + 300, pytest.approx(215))]
    assert (compute.get_xscale(), memory.get_xscale()) == ("log", "log")


def test_a_line_joins_the_sizes_of_a_learner(make):
    runs = [
        make(f"{width}", stream=image_stream(), num_params=[width], train_flops=width * 1e12,
             train_options={"--arch": "alma_mlp", "--width": str(width)})
        for width in (64, 4)
    ]  # fmt: skip
    (drawing,) = draw(runs)
    assert [list(line.get_xdata()) for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 2] == [
        [40, 640]
    ]


def test_text_is_drawn_as_a_way_through_the_stream(make):
    (drawing,) = draw([make("a", [30, 20, 10, 6], num_params=[100, 200, 300, 400])])
    compute, params = drawing.figure.axes
    assert list(compute.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert list(params.lines[0].get_xdata()) == [100, 200, 300, 400]
    assert list(compute.lines[0].get_ydata()) == [30, 25, 20, 16.5]
    assert marks(compute) == [(4, 16.5)]


def test_numbers_beside_the_ends_are_the_experts_that_tell_runs_apart(make):
    runs = [make(f"{n}", num_experts=[n], num_params=[n], train_options={"--num-experts": f"{n}"}) for n in (4, 12)]
    (drawing,) = draw(runs)
    assert sorted(text.get_text() for text in drawing.figure.axes[1].texts) == ["12", "4"]


def test_a_learner_that_waits_stands_in_a_strip_of_its_own_where_it_is_far_above(make):
    stream = text_stream(4, vocab_size=50_000)
    (drawing,) = draw([make("a", [30, 20, 18, 16], stream=stream), make("b", [15.0], wait=4, stream=stream)])
    above, below = drawing.figure.axes[0], drawing.figure.axes[2]
    assert below.get_ylim()[1] < 40 < 30_000 < above.get_ylim()[1]
    assert marks(above) == marks(below)  # both hold everything, each shows its part


def test_colours_stand_for_learners_and_markers_for_waiting_times(make):
    (drawing,) = draw([make("a"), make("b", learner="ens"), make("c", wait=2)])
    assert legend(drawing) == ["SM", "Ens", "wait 1", "wait 2"]


def test_replay_and_what_is_not_complete_are_left_out_and_counted(make):
    (drawing,) = draw([make("a"), make("b", replay=True, train_flops=9e15), make("c", [30], learner="ens")])
    assert len(marks(drawing.figure.axes[0])) == 1
    assert "Without replay." in drawing.caption and "1 run that is not complete left out" in drawing.caption


def test_runs_that_all_replay_are_drawn_hollow(make):
    (drawing,) = draw([make("a", replay=True)])
    (mark,) = [line for line in drawing.figure.axes[0].lines if line.get_markersize() > 6]
    assert mark.get_markerfacecolor() == "white"


def test_the_papers_results_stand_below_on_axes_of_their_own(make):
    (drawing,) = draw([make("a")], paper=True)
    assert len(drawing.figure.axes) == 4
    assert drawing.figure.axes[2].get_title(loc="left") == "the paper's results (Table 2)"
    assert min(y for _, y in marks(drawing.figure.axes[2])) == pytest.approx((19.27 + 18.52 + 18.22 + 18.07) / 4)
    assert "Table 2" in drawing.caption


def test_sizes_of_runs_and_of_the_paper_share_dashes_and_their_samples_in_the_legend(make):
    runs = [make(f"{width}", num_params=[width], train_options={"--decoder-embed-dim": str(width)})
            for width in (64, 96)]  # fmt: skip
    (drawing,) = draw(runs, paper=True)
    assert legend(drawing)[-2:] == ["width 64\nbase (paper)", "width 96\nlarge (paper)"]


def test_the_paper_has_no_table_of_images_to_set_beside(make):
    (drawing,) = draw([make("a", stream=image_stream())], paper=True)
    assert len(drawing.figure.axes) == 2


def test_nothing_is_drawn_without_a_complete_run(make):
    assert draw([make("a", [30]), make("b", [20.0], iid=2)]) == []
