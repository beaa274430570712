import math
import subprocess
import sys

import numpy
import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report import figures
from fairseq_alma.report.read_run import RunTable
from tests.report.fakes import image_stream, text_stream


def draw_all(runs, out, paper=False):
    return figures.draw_all(RunTable.of(runs), out, paper)


@pytest.fixture
def as_svg_alone(monkeypatch):
    """One format takes a third of the time, where it is the drawing that is tested."""
    monkeypatch.setattr("fairseq_alma.report.figures.style._METADATA", {"svg": "Date"})


def names(files):
    return [file.name for file in files]


def test_each_figure_is_there_in_three_formats_with_title_and_caption(make, tmp_path):
    (file, *others) = draw_all([make("a"), make("b", learner="ens")], tmp_path / "out")
    assert names([file, *others]) == ["anytime-curve", "trade-off", "radar"]
    assert [path.name for path in file.files.values()] == [f"anytime-curve.{e}" for e in ("png", "pdf", "svg")]
    assert all(path.stat().st_size > 1000 for each in (file, *others) for path in each.files.values())
    assert all(each.title and each.caption.endswith(".") for each in (file, *others))


def test_no_runs_give_no_figures(tmp_path):
    assert draw_all([], tmp_path) == []


@pytest.mark.usefixtures("as_svg_alone")
def test_runs_on_several_streams_are_drawn_apart(make, tmp_path):
    runs = [make("a"), make("b", stream=image_stream(4)), make("c", stream=text_stream(2, "f" * 64))]
    files = draw_all(runs, tmp_path / "out")
    assert names(files) == [f"{name}-{number}" for number in (1, 2, 3) for name in ("anytime-curve", "trade-off")]
    assert [file.title for file in files][2] == "Anytime curves: digits"


@pytest.mark.usefixtures("as_svg_alone")
@pytest.mark.parametrize(
    "options",
    [
        {"stream": text_stream(1)},
        {"stream": image_stream(1)},
        {"values": [math.inf, math.nan, 5.0, 4.0]},
        {"values": [0.0] * 4, "stream": image_stream(4)},
        {"train_flops": 0.0},
        {"learner": "of_tomorrow"},
        {"num_stages": 1},
        {"wait": 2, "stream": text_stream(4, vocab_size=3)},
        {"iid": 2},
    ],
)
def test_odd_runs_are_drawn_without_a_warning(options, make, tmp_path, recwarn):
    runs = [make("a", **options), make("b", **{**options, "seed": 2}), make("c", **{**options, "learner": "ens"})]
    assert names(draw_all(runs, tmp_path / "out", paper=True))[0] == "anytime-curve"
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.usefixtures("as_svg_alone")
def test_what_is_damaged_is_named_and_the_rest_is_drawn(make, tmp_path, capsys):
    run = make("a", learner="gmoe", stream=image_stream(4), stage_extras=[{"expert_usage": "x"}])
    (run[0]["path"] / "stage-003" / "test-experts.npz").write_bytes(b"no archive")
    assert names(draw_all([run], tmp_path / "out")) == ["anytime-curve", "trade-off"]
    usage, experts = capsys.readouterr().err.splitlines()
    assert "a: expert_usage after arrival t0 is damaged" in usage
    assert "a/stage-003/test-experts.npz: damaged" in experts


def test_without_matplotlib_one_line_says_what_to_install(make, tmp_path, monkeypatch):
    run = make("a")
    for module in [name for name in sys.modules if name.startswith("fairseq_alma.report.figures.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AlmaError, match=r"matplotlib is not installed; pip install 'fairseq-alma\[report\]'"):
        draw_all([run], tmp_path)


def test_importing_reports_does_not_import_what_draws():
    code = "import sys, fairseq_alma.report.figures; print(sorted({'matplotlib', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("as_svg_alone")
def test_a_mixture_of_images_has_all_figures_that_it_allows(make, tmp_path):
    pytest.importorskip("sklearn")
    extras = [{"expert_usage": [[0.5, 0.5]], "gate_trees": [[0, 1]]}] * 4
    run = make("a", learner="gmoe", num_experts=[2], stream=image_stream(4), stage_extras=extras)
    generator, halves = numpy.random.default_rng(0), numpy.repeat([0, 1], 10)
    features = generator.normal(size=(20, 4)).astype("float32")
    numpy.savez(
        run[0]["path"] / "stage-003" / "test-experts.npz", features=features, labels=halves, expert=halves[None]
    )
    others = [make("b", stream=image_stream(4)), make("c", stream=image_stream(4), replay=True)]
    assert names(draw_all([run, *others], tmp_path / "out")) == [
        "anytime-curve", "trade-off", "replay", "radar", "expert-usage", "expert-map-gmoe-w1",
    ]  # fmt: skip
