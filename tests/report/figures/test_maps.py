import json

import numpy
import pytest
from matplotlib.figure import Figure

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.report.experiment import begun
from fairseq_alma.report.figures import maps
from fairseq_alma.report.figures.maps import FILE, draw_tree, embed, routed_images
from fairseq_alma.report.read_run import RunTable, read_run
from tests.report.fakes import drawn, image_stream

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("styled")
EXPERTS = numpy.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
LABELS = numpy.array([3, 4, 5, 6, 6, 6, 6, 6, 6, 9])


def draw(runs):
    return drawn(maps.draw, runs)


def last_images(run):
    (group,) = begun(RunTable.of([run]))
    return next(routed_images(group, 0), None)


@pytest.fixture
def write(make):
    """Write a run of a growing mixture whose last stage left images, 20 in each of two clusters."""

    def write_images(name="a", trees=([0, 1],), num_classes=10, **arrays):
        run = make(
            name, learner="gmoe", stream=image_stream(4, num_classes=num_classes), num_experts=[2],
            stage_extras=[{"gate_trees": list(trees)}] * 4,
        )  # fmt: skip
        generator = numpy.random.default_rng(0)
        halves = numpy.repeat([0, 1], 20)
        given = {
            "features": (generator.normal(size=(40, 8)) + 20 * halves[:, None]).astype("float32"),
            "labels": halves * 7,
            "expert": halves[None],
        }
        numpy.savez(run[0]["path"] / "stage-003" / FILE, **{**given, **arrays})
        return run

    return write_images


def test_images_are_coloured_by_expert_and_marked_by_class(write):
    (drawing,) = draw([write()])
    points, tree = drawing.figure.axes
    assert [(line.get_marker(), len(line.get_xdata())) for line in points.lines if len(line.get_xdata())] == [
        ("$0$", 20),
        ("$7$", 20),
    ]
    assert len({line.get_color() for line in points.lines}) == 2
    assert "50 %\n7" in [text.get_text() for text in tree.texts]
    assert drawing.name == "expert-map-gmoe-w1" and "after arrival t3" in drawing.caption


def test_many_classes_are_dots(write):
    (drawing,) = draw([write(labels=numpy.arange(40), num_classes=62)])
    assert {line.get_marker() for line in drawing.figure.axes[0].lines} == {"."}


def test_the_map_keeps_neighbours_together(write):
    places = embed(last_images(write()))
    one, other = places[:20], places[20:]
    assert numpy.linalg.norm(one.mean(0) - other.mean(0)) > numpy.linalg.norm(one - one.mean(0), axis=1).max()


def test_equal_features_share_a_map(write):
    first, second = (last_images(write(name)) for name in "ab")
    assert embed(first) is embed(second)


@pytest.mark.parametrize("num_images,num_features", [(1, 8), (3, 1), (6, 1), (60, 70)])
def test_few_images_and_few_or_many_features_have_a_map_too(num_images, num_features, write):
    features = numpy.random.default_rng(1).normal(size=(num_images, num_features)).astype("float32")
    zeros = numpy.zeros(num_images, dtype=int)
    run = write(features=features, labels=zeros, expert=zeros[None])
    assert embed(last_images(run)).shape == (num_images, 2)


@pytest.mark.parametrize(
    "arrays,message",
    [
        ({"labels": numpy.zeros(3, dtype=int)}, "do not belong together"),
        ({"expert": numpy.zeros(40, dtype=int)}, "do not belong together"),
        ({"features": numpy.full((40, 8), numpy.nan)}, "not finite"),
        ({"labels": numpy.array([{}] * 40)}, "damaged"),
        ({"expert": numpy.full((1, 40), 5)}, "do not belong to the gate_trees"),
        ({"expert": numpy.zeros((3, 40), dtype=int)}, "do not belong to the gate_trees"),
    ],
)
def test_arrays_that_do_not_fit_are_named(arrays, message, write):
    with pytest.raises(AlmaError, match=rf"stage-003/test-experts.npz.* {message}"):
        draw([write(**arrays)])


def test_a_file_that_is_cut_off_is_named(write):
    run = write()
    path = run[0]["path"] / "stage-003" / FILE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(AlmaError, match=r"test-experts.npz: damaged"):
        draw([run])


def test_damaged_trees_are_named(write):
    with pytest.raises(AlmaError, match=r"stage-003/stage.json: gate_trees is damaged"):
        draw([write(trees=[3])])


def test_a_gate_that_never_grew_is_flat(write):
    path = write()[0]["path"]
    record = json.loads((path / "stage-003" / "stage.json").read_text())
    del record["gate_trees"]
    (path / "stage-003" / "stage.json").write_text(json.dumps(record))
    assert last_images(read_run(path)).trees[0].to_nested() == [0, 1]


def test_nothing_is_drawn_where_no_run_left_images(make):
    assert draw([make("a"), make("b", stream=image_stream(4))]) == []


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
