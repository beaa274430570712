import math
import random

import pytest
from matplotlib.figure import Figure

from fairseq_alma.report.figures.number_axes import NARROW, gap_in, linear, logarithmic, plain, scientific, show_tflops


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
