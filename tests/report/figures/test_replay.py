import pytest

from fairseq_alma.report.figures.replay import draw, pairs_of
from fairseq_alma.report.figures.run_groups import groups_of
from tests.report.fakes import image_stream

pytestmark = pytest.mark.usefixtures("styled")


def test_runs_that_are_alike_but_for_replay_are_pairs(make):
    runs = [make("a"), make("b", replay=True), make("c", replay=True, wait=2), make("d", learner="ens")]
    (pair,) = pairs_of(groups_of(runs))
    assert (pair.without.first.path.name, pair.replayed.first.path.name) == ("a", "b")


def test_a_segment_goes_from_without_to_with_replay(make):
    stream = image_stream(2)
    (drawing,) = draw([make("a", [0.5, 0.25], stream=stream), make("b", [0.5, 0.125], stream=stream, replay=True)])
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
    (drawing,) = draw(runs)
    assert [axes.get_title() for axes in drawing.figure.axes] == ["SM", "Ens", "UMix", "gMoE"]
    assert len({axes.get_xlim() for axes in drawing.figure.axes}) == 1


def test_nothing_is_drawn_without_a_pair(make):
    assert draw([make("a"), make("b", replay=True, wait=2), make("c", [30], replay=True)]) == []


def test_bars_of_the_deviation_are_not_cut(make):
    stream = image_stream(2)
    runs = [make(f"a{seed}", [error, error], stream=stream, seed=seed) for seed, error in enumerate((0.3, 0.5, 0.7))]
    (drawing,) = draw([*runs, make("b", [0.5, 0.4], stream=stream, replay=True)])
    low, high = drawing.figure.axes[0].get_ylim()
    assert low < 100 - 40 and high > 100 + 40
