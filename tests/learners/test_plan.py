import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import stage_ending_with, stages


@pytest.mark.parametrize(
    ("arguments", "options", "megabatches"),
    [
        ((4, 1), {}, [(0,), (1,), (2,), (3,)]),
        ((4, 3), {}, [(0, 1, 2), (3,)]),  # the last stage takes what is left
        ((2, 5), {}, [(0, 1)]),
        ((4, 3), {"drop_rest": True}, [(0, 1, 2)]),  # as in Table 2
        ((4, 4), {"drop_rest": True}, [(0, 1, 2, 3)]),
        ((2, 5), {"drop_rest": True}, []),
        ((5, 2), {"replay": True}, [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4)]),
    ],
)
def test_a_stage_has_what_has_arrived_since_the_one_before_and_with_replay_all(arguments, options, megabatches):
    assert [stage.megabatches for stage in stages(*arguments, **options)] == megabatches


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("num_megabatches", range(1, 9))
@pytest.mark.parametrize("wait", range(1, 9))
def test_every_megabatch_arrives_exactly_once_and_in_order(num_megabatches, wait, replay):
    arrived = [t for stage in stages(num_megabatches, wait, replay) for t in stage.arrivals]
    assert arrived == list(range(num_megabatches))


@pytest.mark.parametrize("num_megabatches,wait", [(0, 1), (4, 0)])
def test_impossible_schedules_are_refused(num_megabatches, wait):
    with pytest.raises(ValueError, match="at least"):
        stages(num_megabatches, wait)


def test_the_stage_that_ends_with_a_megabatch_is_found_and_another_refused_with_those_that_do():
    assert stage_ending_with(3, 4, wait=3).megabatches == (3,)
    assert stage_ending_with(2, 4, wait=3).megabatches == (0, 1, 2)
    assert stage_ending_with(3, 4, wait=2, replay=True).megabatches == (0, 1, 2, 3)
    with pytest.raises(AlmaError, match=r"--megabatch 1 --wait 3.*give one of 2, 3"):
        stage_ending_with(1, 4, wait=3)
