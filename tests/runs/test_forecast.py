import pytest

from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.forecast import Forecast


def test_nothing_is_forecast_before_anything_is_known():
    assert Forecast({ModelId(0, 0): 1.0}).seconds_left([ModelId(0, 0)]) is None


def test_trainings_ahead_are_taken_to_last_as_long_as_those_that_are_over():
    forecast = Forecast({ModelId(stage, 0): 1.0 for stage in range(4)})
    forecast.finish([ModelId(0, 0)], 50.0)
    forecast.add(10.0)  # a test
    assert forecast.seconds_left() == 180.0
    # The second training takes 30 in all: the mean of both, its test apart, is 45.
    assert forecast.seconds_left([ModelId(1, 0)], whole=30.0, rest=10.0) == 10.0 + 2 * 45.0


def test_the_first_training_forecasts_the_others():
    forecast = Forecast({ModelId(stage, 0): 1.0 for stage in range(3)})
    assert forecast.seconds_left([ModelId(0, 0)], whole=100.0, rest=60.0) == 260.0


def test_more_data_takes_longer():
    forecast = Forecast({ModelId(0, 0): 10.0, ModelId(1, 0): 20.0, ModelId(2, 0): 30.0})
    forecast.finish([ModelId(0, 0)], 5.0)
    assert forecast.seconds_left() == pytest.approx(25.0)


def test_trainings_that_are_there_already_cost_nothing():
    forecast = Forecast({ModelId(0, member): 1.0 for member in range(3)})
    forecast.drop([ModelId(0, 1)])
    forecast.finish([ModelId(0, 0)], 7.0)
    assert forecast.seconds_left() == 7.0
