import math

import pytest

from fairseq_alma.report.finding import Spread, difference, half_interval, is_close


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
    assert is_close(spread(10.0, 12.0), spread(16.0, first_seed=10))  # two seeds tell little: 12.7 standard errors
    assert not is_close(spread(10.0, 11.0, 12.0), spread(20.0, first_seed=10))
    assert is_close(spread(100.0), spread(100.9)) and not is_close(spread(100.0), spread(101.5))  # within one percent


@pytest.mark.parametrize(
    ("num_seeds", "half"),  # of many seeds nearly that of a normal distribution
    [(seeds, t / seeds**0.5) for seeds, t in ((2, 12.706), (3, 4.303), (31, 2.042), (62, 1.9996), (10_001, 1.9602))],
)
def test_an_interval_is_students(num_seeds, half):
    assert half_interval(1.0, num_seeds) == pytest.approx(half, rel=1e-3)


def test_a_model_that_diverged_for_every_seed_is_worse_than_any_other():
    diverged = spread(math.inf, math.inf)
    assert not is_close(spread(9.0, 9.5), diverged) and not is_close(diverged, spread(9.0, 9.5))
    assert not is_close(spread(9.0), spread(math.inf))


def test_where_some_seeds_diverged_nobody_can_tell():
    for one, other in [
        (spread(9.0, 9.5), spread(math.inf, 10.0)),
        (spread(math.inf, math.inf), spread(math.inf, math.inf)),
        (spread(math.inf, 9.0), spread(math.inf, 8.0)),
    ]:
        assert spread(math.inf, 10.0).mean == math.inf
        assert is_close(one, other) and is_close(other, one)
    assert difference(spread(math.inf, 9.0), spread(math.inf, 8.0)) is None
