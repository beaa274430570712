import pytest

from fairseq_alma.report.experiment import begun
from fairseq_alma.report.figures import trade_off
from fairseq_alma.report.figures.trade_off import Trace, replay_pairs
from fairseq_alma.report.read_run import RunTable
from tests.report.fakes import drawn, image_stream, text_stream

pytestmark = pytest.mark.usefixtures("styled")


def draw_trade_off(runs, paper=False):
    return drawn(trade_off.draw_trade_off, runs, paper)


def draw_experts(runs, paper=False):
    return drawn(trade_off.draw_experts, runs, paper)


def draw_replay(runs):
    return drawn(trade_off.draw_replay, runs)


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
    (drawing,) = draw_trade_off([run])
    compute, memory = drawing.figure.axes
    assert marks(compute) == [(12, pytest.approx(90 + 50 + 50 + 25))]
    assert marks(memory) == [(3 * 100 + 300, pytest.approx(215))]
    assert (compute.get_xscale(), memory.get_xscale()) == ("log", "log")


def test_a_marker_that_another_covers_shows_as_a_ring_around_it(make):
    runs = [make(name, [30, 20], learner, text_stream(2)) for name, learner in (("a", "sm"), ("b", "gmoe"))]
    (drawing,) = draw_trade_off([*runs, make("c", [90, 80], "ens", text_stream(2))])
    sizes = [line.get_markersize() for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 1]
    below, above, alone = [size for size in sizes if size > 6]
    assert sorted([below, above, alone]) == [above, alone, below] and above == alone < below


def test_a_line_joins_the_sizes_of_a_learner(make):
    runs = [
        make(f"{width}", stream=image_stream(), num_params=[width], train_flops=width * 1e12,
             train_options={"--arch": "alma_mlp", "--width": str(width)})
        for width in (64, 4)
    ]  # fmt: skip
    (drawing,) = draw_trade_off(runs)
    assert [list(line.get_xdata()) for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 2] == [
        [40, 640]
    ]


def test_text_is_drawn_as_a_way_through_the_stream(make):
    (drawing,) = draw_trade_off([make("a", [30, 20, 10, 6], num_params=[100, 200, 300, 400])])
    compute, params = drawing.figure.axes
    assert list(compute.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert list(params.lines[0].get_xdata()) == [100, 200, 300, 400]
    assert list(compute.lines[0].get_ydata()) == [30, 25, 20, 16.5]
    assert marks(compute) == [(4, 16.5)]


def test_numbers_beside_the_ends_are_the_experts_that_tell_runs_apart(make):
    runs = [make(f"{n}", num_experts=[n], num_params=[n], train_options={"--num-experts": f"{n}"}) for n in (4, 12)]
    (drawing,) = draw_trade_off(runs)
    assert sorted(text.get_text() for text in drawing.figure.axes[1].texts) == ["12", "4"]


def test_a_learner_that_waits_stands_in_a_strip_of_its_own_where_it_is_far_above(make):
    stream = text_stream(4, vocab_size=50_000)
    (drawing,) = draw_trade_off([make("a", [30, 20, 18, 16], stream=stream), make("b", [15.0], wait=4, stream=stream)])
    above, below = drawing.figure.axes[0], drawing.figure.axes[2]
    assert below.get_ylim()[1] < 40 < 30_000 < above.get_ylim()[1]
    assert marks(above) == marks(below)  # both hold everything, each shows its part


def test_colours_stand_for_learners_and_markers_for_waiting_times(make):
    (drawing,) = draw_trade_off([make("a"), make("b", learner="ens"), make("c", wait=2)])
    assert legend(drawing) == ["SM", "Ens", "wait 1", "wait 2"]


def test_replay_and_what_is_not_complete_are_left_out_and_counted(make):
    (drawing,) = draw_trade_off([make("a"), make("b", replay=True, train_flops=9e15), make("c", [30], learner="ens")])
    assert len(marks(drawing.figure.axes[0])) == 1
    assert "Without replay." in drawing.caption and "1 run that is not complete left out" in drawing.caption


def test_runs_that_all_replay_are_drawn_hollow(make):
    (drawing,) = draw_trade_off([make("a", replay=True)])
    (mark,) = [line for line in drawing.figure.axes[0].lines if line.get_markersize() > 6]
    assert mark.get_markerfacecolor() == "white"


def test_the_papers_results_stand_below_on_axes_of_their_own(make):
    (drawing,) = draw_trade_off([make("a")], paper=True)
    assert len(drawing.figure.axes) == 4
    assert drawing.figure.axes[2].get_title(loc="left") == "the paper's results (Table 2)"
    assert min(y for _, y in marks(drawing.figure.axes[2])) == pytest.approx((19.27 + 18.52 + 18.22 + 18.07) / 4)
    assert "Table 2" in drawing.caption


def test_sizes_of_runs_and_of_the_paper_share_dashes_and_their_samples_in_the_legend(make):
    runs = [make(f"{width}", num_params=[width], train_options={"--decoder-embed-dim": str(width)})
            for width in (64, 96)]  # fmt: skip
    (drawing,) = draw_trade_off(runs, paper=True)
    assert legend(drawing)[-2:] == ["width 64\nbase (paper)", "width 96\nlarge (paper)"]


def test_the_paper_has_no_table_of_images_to_set_beside(make):
    (drawing,) = draw_trade_off([make("a", stream=image_stream())], paper=True)
    assert len(drawing.figure.axes) == 2


def test_no_trade_off_is_drawn_without_a_complete_run(make):
    assert draw_trade_off([make("a", [30]), make("b", [20.0], iid=2)]) == []


def test_experts_are_counted_over_all_models_that_predict_together(make):
    runs = [make("a", num_experts=[8]), make("b", learner="ens", num_experts=[4], num_members=[4])]
    (drawing,) = draw_experts(runs)
    assert [list(line.get_xdata()) for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 4][::2] == [
        [8] * 4,
        [16] * 4,
    ]


def test_a_growing_learner_moves_to_the_right(make):
    (drawing,) = draw_experts([make("a", [30, 20, 10, 6], learner="gmoe", num_experts=[4, 6, 8, 12])])
    line = drawing.figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([4, 6, 8, 12], [30, 25, 20, 16.5])


def test_the_papers_experts_stand_below(make):
    (drawing,) = draw_experts([make("a", learner="gmoe", num_experts=[4, 6])], paper=True)
    assert len(drawing.figure.axes) == 2
    assert max(max(line.get_xdata()) for line in drawing.figure.axes[1].lines) == 16


def test_nothing_is_drawn_where_all_have_equally_many_experts_or_on_images(make):
    assert draw_experts([make("a"), make("b", wait=2)]) == []
    assert draw_experts([make("c", learner="gmoe", num_experts=[1, 2], stream=image_stream())]) == []


def test_runs_that_are_alike_but_for_replay_are_pairs(make):
    runs = [make("a"), make("b", replay=True), make("c", replay=True, wait=2), make("d", learner="ens")]
    ((without, replayed),) = replay_pairs(begun(RunTable.of(runs)))
    assert (without.first.path.name, replayed.first.path.name) == ("a", "b")


def test_a_segment_goes_from_without_to_with_replay(make):
    stream = image_stream(2)
    (drawing,) = draw_replay(
        [make("a", [0.5, 0.25], stream=stream), make("b", [0.5, 0.125], stream=stream, replay=True)]
    )
    line = drawing.figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [2, 3]  # the second update sees both mega-batches again
    assert list(line.get_ydata()) == [75, 62.5]


def test_many_pairs_have_a_panel_for_each_learner(make):
    runs = [
        make(f"{learner}{wait}{replay}", learner=learner, wait=wait, replay=replay, stream=image_stream(20))
        for learner in ("sm", "ens", "umix", "gmoe")
        for wait in (1, 2, 5, 10)
        for replay in (False, True)
    ]
    (drawing,) = draw_replay(runs)
    assert [axes.get_title() for axes in drawing.figure.axes] == ["SM", "Ens", "UMix", "gMoE"]
    assert len({axes.get_xlim() for axes in drawing.figure.axes}) == 1


def test_nothing_is_drawn_without_a_pair(make):
    assert draw_replay([make("a"), make("b", replay=True, wait=2), make("c", [30], replay=True)]) == []


def test_bars_of_the_deviation_are_not_cut(make):
    stream = image_stream(2)
    runs = [make(f"a{seed}", [error, error], stream=stream, seed=seed) for seed, error in enumerate((0.3, 0.5, 0.7))]
    (drawing,) = draw_replay([*runs, make("b", [0.5, 0.4], stream=stream, replay=True)])
    low, high = drawing.figure.axes[0].get_ylim()
    assert low < 100 - 40 and high > 100 + 40


def way(runs):
    """Average, compute so far, parameters and experts at each arrival from the first update on."""
    (group,) = begun(RunTable.of(runs))
    trace = Trace.way(group, ["tflops", "params", "experts"])
    return list(zip(trace.results.tolist(), *(cost.tolist() for cost in trace.costs), strict=True)), group


def test_a_way_through_the_stream_has_what_a_learner_had_cost_by_each_arrival(make):
    run = make("a", [30, 20], wait=2, num_params=[100, 300], num_experts=[4, 6], num_members=[2], train_flops=1e12)
    points, group = way([run])
    assert list(group.course.index[group.course.done.cummax()]) == [1, 2, 3]
    assert points == [
        ((50 + 30) / 2, 4, 100, 8),  # the stream has a vocabulary of 50; 2 mega-batches times 2 members
        ((50 + 30 + 30) / 3, 4, 100, 8),
        ((50 + 30 + 30 + 20) / 4, 8, 300, 12),
    ]


def test_its_end_is_the_average_perplexity(make):
    run = make("a", [30, 20, 10, 6])
    assert way([run])[0][-1][0] == run[0]["anytime"]


def test_its_points_are_means_over_seeds(make):
    points, _ = way([make("a", [30, 20, 10, 6]), make("b", [40, 20, 10, 6], seed=2)])
    assert [average for average, *_ in points] == pytest.approx([35, 27.5, 65 / 3, 17.75])


def test_a_caption_speaks_of_numbers_only_where_there_are_some(make):
    (plain,) = draw_trade_off([make("a"), make("b", learner="ens", num_members=[2])])
    options = {"--arch": "alma_switch_lm_tiny", "--num-experts": "8"}
    (numbered,) = draw_trade_off([make("c"), make("d", num_experts=[8], train_options=options)])
    assert "numbers are experts" in numbered.caption and "numbers are experts" not in plain.caption
