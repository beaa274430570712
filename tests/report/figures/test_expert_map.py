import numpy
import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures.expert_map import draw
from fairseq_alma.report.figures.routed_images import FILE, embed, last_routed_images
from tests.report.fakes import image_stream

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("styled")


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
        numpy.savez(run.path / "stage-003" / FILE, **{**given, **arrays})
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
    places = embed(last_routed_images(write()).path)
    one, other = places[:20], places[20:]
    assert numpy.linalg.norm(one.mean(0) - other.mean(0)) > numpy.linalg.norm(one - one.mean(0), axis=1).max()


def test_equal_features_share_a_map(write):
    first, second = (last_routed_images(write(name)).path for name in "ab")
    assert embed(first) is embed(second)


@pytest.mark.parametrize("num_images,num_features", [(1, 8), (3, 1), (6, 1), (60, 70)])
def test_few_images_and_few_or_many_features_have_a_map_too(num_images, num_features, write):
    features = numpy.random.default_rng(1).normal(size=(num_images, num_features)).astype("float32")
    zeros = numpy.zeros(num_images, dtype=int)
    run = write(features=features, labels=zeros, expert=zeros[None])
    assert embed(last_routed_images(run).path).shape == (num_images, 2)


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
    path = run.path / "stage-003" / FILE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(AlmaError, match=r"test-experts.npz: damaged"):
        draw([run])


def test_damaged_trees_are_named(write):
    with pytest.raises(AlmaError, match=r"stage-003/stage.json: gate_trees is damaged"):
        draw([write(trees=[3])])


def test_a_gate_that_never_grew_is_flat(write):
    run = write(trees=())
    run.extras["gate_trees"][3] = None
    assert last_routed_images(run).trees[0].to_nested() == [0, 1]


def test_nothing_is_drawn_where_no_run_left_images(make):
    assert draw([make("a"), make("b", stream=image_stream(4))]) == []
