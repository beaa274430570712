import math
import random
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import NARROW, gap_in, linear, logarithmic, plain, scientific, show_tflops
from fairseq_alma.report.spelling import LEARNER_COLOURS


@pytest.mark.parametrize("seed", range(10))
def test_labels_are_moved_apart_and_keep_their_order(seed):
    generator = random.Random(seed)
    places = [generator.uniform(0, 1) for _ in range(8)]
    spread = style.spread(places, 0.1)
    ordered = [spread[index] for index in sorted(range(8), key=lambda index: places[index])]
    assert all(after - before >= 0.1 - 1e-9 for before, after in pairwise(ordered))


def test_labels_that_have_room_stay_where_they_are():
    assert style.spread([0.9, 0.1, 0.5], 0.2) == [0.9, 0.1, 0.5]


def test_every_learner_has_a_colour_of_its_own():
    assert len({style.colour_of(learner) for learner in LEARNER_COLOURS}) == len(LEARNER_COLOURS)
    assert style.colour_of("a learner of tomorrow") == style.GREY


def test_every_waiting_time_has_a_marker_of_its_own():
    markers = style.wait_markers([1, 2, 3, 4, 5, 6, 7, 8, 10, 25, 50, 100, 500])
    assert len(set(markers.values())) == 13
    assert style.wait_markers([2])[2] == markers[2]
    assert style.IID_MARKER not in markers.values()


def test_letters_on_any_colour_of_an_expert_can_be_read():
    def luminance(colour):
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in style.EXPERT_COLOURS:
        ink = {"black": 0.0, "white": 1.0}[style.ink_on(colour)]
        light, dark = sorted((luminance(colour), ink), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0


def draw_something(folder):
    with style.applied():
        figure = style.new_figure(3, 2)
        figure.subplots().plot([1, 2], [3, 4], label="words")
        return list(style.save(figure, folder / "picture").values())


def test_a_figure_is_written_in_three_formats_that_need_nothing_else(tmp_path):
    png, pdf, svg = draw_something(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"/FontFile2" in pdf.read_bytes() and b"/Type3" not in pdf.read_bytes()  # TrueType, embedded
    picture = svg.read_text()
    assert "<text" not in picture and "fill: #ffffff" in picture
    assert len(list(tmp_path.iterdir())) == 3


def test_the_same_figure_is_the_same_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for one, other in zip(draw_something(tmp_path / "a"), draw_something(tmp_path / "b"), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_drawing_leaves_the_settings_of_others_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_something(tmp_path)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    "value,text",
    [(0, "0"), (0.5, "0.5"), (1000, "1,000"), (1e7, "$10^{7}$"), (2e7, r"$2{\times}10^{7}$"), (1e-5, "$10^{-5}$")],
)
def test_ticks_are_spelled_plainly_where_they_are_short(value, text):
    assert plain(value) == text


def test_costs_over_a_wide_range_are_spelled_as_powers():
    assert show_tflops([1, 1000]) is scientific
    assert show_tflops([1, 100]) is plain


@pytest.mark.parametrize("seed", range(20))
def test_a_logarithmic_axis_shows_all_values_and_at_least_two_ticks(seed):
    generator = random.Random(seed)
    values = [10 ** generator.uniform(-3, 9) for _ in range(generator.randint(1, 5))]
    if seed % 2:
        values = [values[0] * generator.uniform(1, 1.3) for _ in range(3)]
    axes = Figure().subplots()
    logarithmic(axes.yaxis, values, least_span=NARROW if seed % 4 == 1 else 4.0)
    low, high = axes.get_ylim()
    assert low <= min(values) and max(values) <= high
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 2


def test_a_span_of_three_has_more_ticks_than_its_ends():
    axes = Figure().subplots()
    logarithmic(axes.yaxis, [96, 306], least_span=NARROW)
    low, high = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if low <= tick <= high] == [100, 150, 200, 300]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -1, 0], [5, math.inf]])
@pytest.mark.parametrize("scale", [linear, logarithmic])
def test_an_axis_has_sensible_limits_whatever_a_run_wrote(scale, values):
    axes = Figure().subplots()
    scale(axes.xaxis, values)
    low, high = axes.get_xlim()
    assert math.isfinite(low) and math.isfinite(high) and low < high


def test_an_axis_is_broken_within_its_widest_gap():
    gap = gap_in([20, 25, 30, 4000, 6000])
    assert gap is not None and 30 < gap < 4000


def test_an_axis_without_a_wide_gap_is_not_broken():
    assert gap_in([20, 30, 50, 100, 200]) is None
    assert gap_in([7]) is None
