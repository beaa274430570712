import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import stage_ending_with, stages


def data(*arguments, **options):
    return [stage.megabatches for stage in stages(*arguments, **options)]


def test_without_waiting_each_megabatch_is_a_stage():
    assert data(4, 1) == [(0,), (1,), (2,), (3,)]


def test_the_last_stage_takes_what_is_left_of_the_stream():
    assert data(4, 3) == [(0, 1, 2), (3,)]
    assert data(2, 5) == [(0, 1)]


def test_the_rest_is_dropped_when_asked_as_in_table_2():
    assert data(4, 3, drop_rest=True) == [(0, 1, 2)]
    assert data(4, 4, drop_rest=True) == [(0, 1, 2, 3)]
    assert data(2, 5, drop_rest=True) == []


def test_replay_trains_on_all_that_has_arrived():
    assert data(5, 2, replay=True) == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
    assert [stage.arrivals for stage in stages(5, 2, replay=True)] == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize("num_megabatches", range(1, 9))
@pytest.mark.parametrize("wait", range(1, 9))
def test_every_megabatch_arrives_exactly_once_and_in_order(num_megabatches, wait):
    arrived = [t for stage in stages(num_megabatches, wait) for t in stage.arrivals]
    assert arrived == list(range(num_megabatches))


@pytest.mark.parametrize("num_megabatches,wait", [(0, 1), (4, 0)])
def test_impossible_schedules_are_refused(num_megabatches, wait):
    with pytest.raises(ValueError, match="at least"):
        stages(num_megabatches, wait)


def test_the_stage_that_ends_with_a_megabatch_is_found():
    assert stage_ending_with(3, 4, wait=3).megabatches == (3,)
    assert stage_ending_with(2, 4, wait=3).megabatches == (0, 1, 2)
    assert stage_ending_with(3, 4, wait=2, replay=True).megabatches == (0, 1, 2, 3)


def test_a_megabatch_that_ends_no_stage_is_refused_naming_those_that_do():
    with pytest.raises(AlmaError, match=r"--megabatch 1 --wait 3.*give one of 2, 3"):
        stage_ending_with(1, 4, wait=3)
