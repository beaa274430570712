import math

import pytest

pytest.importorskip("matplotlib", reason="extra [report]")

from fairseq_alma.report.figures import draw_all, write
from tests.report.fakes import image_stream, text_stream


@pytest.fixture
def draw(groups):
    return lambda *options: {drawing.name: drawing for drawing in draw_all(groups(*options))}


def test_text_has_a_curve_that_holds_each_value_until_the_next_arrival(draw, tmp_path):
    drawing = draw({"values": [30.0, 20.0], "stream": text_stream(4), "wait": 2})["curve"]
    ((line,),) = (axes.lines for axes in drawing.figure.axes)
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4] and list(line.get_ydata()) == [50, 30, 30, 20, 20]
    paths = write(drawing, tmp_path / "figures")
    assert paths["png"].read_bytes()[:4] == b"\x89PNG" and paths["pdf"].read_bytes()[:4] == b"%PDF"


def test_sizes_are_panels_controls_markers_and_seeds_a_band(draw):
    sizes = [
        {
            "seed": seed, "values": [40.0 - width - seed, 30 - width], "num_params": (width,), "stream": text_stream(2),
            "train_options": {"--arch": "alma_switch_lm", "--decoder-embed-dim": str(width)},
        }
        for width in (8, 16)
        for seed in (1, 2)
    ]  # fmt: skip
    figure = draw(*sizes, {**sizes[0], "values": [20.0], "iid": 2})["curve"].figure
    assert [axes.get_title() for axes in figure.axes] == ["width 8", "width 16"]
    assert [len(axes.collections) for axes in figure.axes] == [1, 1]
    assert figure.axes[0].lines[-1].get_xydata().tolist() == [[1, 20]]


def test_the_caption_says_how_many_sizes_are_shown_and_names_may_have_dollars(draw, tmp_path):
    sizes = ((8, "1"), *((width, "$_1$ $") for width in (8, 16, 32, 64, 128)))
    words = [{"--decoder-embed-dim": str(width), "--lr": rate} for width, rate in sizes]
    drawing = draw(*({"train_options": {"--arch": "alma_switch_lm", **each}} for each in words))["curve"]
    assert drawing.caption.endswith("4 of 5 sizes are shown.")
    write(drawing, tmp_path)  # raised an error of mathtext
    assert "untrained" not in draw({"values": [30.0, math.inf, 20.0]})["curve"].caption
    assert draw({"values": [9.0], "wait": 4})["curve"].caption.endswith("of the untrained model (50) is not shown.")


def test_the_trade_off_of_text_is_a_path_and_that_of_images_a_point_over_compute_and_memory(draw):
    text = draw({"learner": "gens", "num_members": (1, 2, 3, 4), "num_params": (10, 20, 30, 40)})["trade-off"].figure
    assert list(text.axes[1].lines[0].get_xdata()) == [10, 20, 30, 40]
    images = draw({"stream": image_stream(4), "num_params": (10,)})["trade-off"].figure
    assert draw({"stream": image_stream(2), "values": [0.5, 0.0]})["curve"].figure.axes[0].get_yscale() == "linear"
    assert list(images.axes[0].lines[0].get_xdata()) == [4e12] and list(images.axes[1].lines[0].get_xdata()) == [40]


@pytest.mark.filterwarnings("error:constrained_layout")
def test_growth_shows_three_points_a_step_beside_long_names_and_nothing_is_drawn_before_the_first_stage(draw, tmp_path):
    first = {"learner": "gmoe", "values": [40.0, 20.0], "stream": text_stream(2), "num_experts": (4, 6)}
    words = {"--arch": "alma_switch_lm_tiny", **{f"--option-{number}": "value" for number in range(9)}}
    grown = draw(first, {**first, "train_options": words})["growth"]
    assert [list(line.get_ydata()) for line in grown.figure.axes[0].lines] == 2 * [[42.0, 25.0, 21.0]]
    write(grown, tmp_path)  # the names left no space
    assert draw({"num_stages": 0}) == {}
