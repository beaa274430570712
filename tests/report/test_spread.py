import math

import pytest

from fairseq_alma.report.spread import Spread, difference, is_close


def spread(*values, first_seed=1):
    return Spread.of({first_seed + index: value for index, value in enumerate(values)})


def test_mean_and_deviation_are_those_of_a_sample():
    found = spread(1.0, 2.0, 3.0)
    assert (found.mean, found.deviation, found.num_seeds) == (2.0, 1.0, 3)
    assert found.show(2) == "2.00 ± 1.00"
    assert found.show(1, scale=100) == "200.0 ± 100.0"


def test_one_seed_has_no_deviation_and_no_value_is_no_spread():
    assert math.isnan(spread(5.0).deviation)
    assert spread(5.0).show(2) == "5.00"
    assert Spread.of({1: None, 2: math.nan}) is None


def test_shared_seeds_are_compared_in_pairs():
    one, other = spread(10.0, 20.0, 30.0), spread(10.5, 20.6, 30.4)
    gap = difference(one, other)
    assert gap.mean == pytest.approx(0.5)
    assert gap.deviation == pytest.approx(0.1)
    assert not is_close(one, other)  # though both spread far more than they differ


def test_seeds_that_are_not_shared_are_compared_by_their_deviations():
    one = spread(10.0, 20.0, 30.0)
    assert difference(one, spread(10.5, 20.5, 30.5, first_seed=10)) is None
    assert is_close(one, spread(10.5, 20.5, 30.5, first_seed=10))
    assert not is_close(one, spread(60.0, 70.0, 80.0, first_seed=10))
    assert is_close(spread(10.0, 12.0), spread(13.0, first_seed=10))  # its one seed may be as far off
    assert not is_close(spread(10.0, 12.0), spread(16.0, first_seed=10))


def test_single_seeds_are_close_within_one_percent():
    assert is_close(spread(100.0), spread(100.9))
    assert not is_close(spread(100.0), spread(101.5))


def test_a_model_that_diverged_is_worse_than_any_other():
    diverged = spread(math.inf, 10.0)
    assert diverged.mean == math.inf
    assert not is_close(spread(9.0, 9.5), diverged)
