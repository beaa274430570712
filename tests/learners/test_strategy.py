import itertools

from fairseq_alma.learners.plan import Model, StagePlan, Training, member_seed, needed_models
from fairseq_alma.learners.schedule import stages
from fairseq_alma.learners.strategy import LEARNERS, LearnerOptions, plan_stages


def test_the_single_model_goes_on_from_the_stage_before():
    plans = plan_stages("sm", LearnerOptions(seed=5), stages(3, 1))
    assert [plan.trainings for plan in plans] == [
        (Training(Model(0, 0), 5, None),),
        (Training(Model(1, 0), 5, Model(0, 0)),),
        (Training(Model(2, 0), 5, Model(1, 0)),),
    ]
    assert [plan.predictors for plan in plans] == [(Model(0, 0),), (Model(1, 0),), (Model(2, 0),)]


def test_from_scratch_no_stage_needs_another():
    plans = plan_stages("sm", LearnerOptions(seed=5, from_previous=False), stages(3, 1))
    assert all(training.start is None for plan in plans for training in plan.trainings)


def test_every_learner_trains_something_and_predicts_with_what_is_trained():
    for name in LEARNERS:
        trained = set()
        for plan in plan_stages(name, LearnerOptions(seed=1, grow_schedule=(4, 6, 8)), stages(5, 2)):
            trained |= {training.model for training in plan.trainings}
            assert plan.trainings
            assert set(plan.predictors) <= trained


def test_member_zero_has_the_seed_of_the_run_and_no_two_updates_share_one():
    assert member_seed(3, 0) == 3
    updates = 1_000_000
    used = [range(member_seed(3, member), member_seed(3, member) + updates) for member in range(5)]
    assert all(a.stop <= b.start for a, b in itertools.pairwise(used))
    assert member_seed(9_999_999, 199) + updates < 2**32


def test_only_the_weights_that_a_later_stage_starts_from_are_needed():
    plans = plan_stages("sm", LearnerOptions(seed=1), stages(3, 1))
    assert needed_models(plans, 0) == {Model(0, 0)}
    assert needed_models(plans, 1) == {Model(1, 0)}


def test_the_last_weights_of_a_run_are_needed():
    plans = plan_stages("sm", LearnerOptions(seed=1), stages(3, 1))
    assert needed_models(plans, 2) == {Model(2, 0)}


def test_models_that_predict_without_being_trained_again_are_needed():
    first, second = stages(2, 1)
    old, new = Model(0, 0), Model(1, 1)
    plans = [
        StagePlan(first, (Training(old, 1),), (old,)),
        StagePlan(second, (Training(new, 2),), (old, new), "probabilities"),
    ]
    assert needed_models(plans, 0) == {old}
    assert needed_models(plans, 1) == {old, new}
