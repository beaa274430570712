import itertools

from fairseq_alma.learners.plan import Growth, Model, NeededModels, StagePlan, Training, member_seed
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
    assert set(NeededModels(plans).after(0)) == {Model(0, 0)}
    assert set(NeededModels(plans).after(1)) == {Model(1, 0)}


def test_the_last_weights_of_a_run_are_needed():
    plans = plan_stages("sm", LearnerOptions(seed=1), stages(3, 1))
    assert set(NeededModels(plans).after(2)) == {Model(2, 0)}


def test_models_that_predict_without_being_trained_again_are_needed():
    first, second = stages(2, 1)
    old, new = Model(0, 0), Model(1, 1)
    plans = [
        StagePlan(first, (Training(old, 1),), (old,)),
        StagePlan(second, (Training(new, 2),), (old, new), "probabilities"),
    ]
    assert set(NeededModels(plans).after(0)) == {old}
    assert set(NeededModels(plans).after(1)) == {old, new}


def ensemble_plans(**options):
    return plan_stages("ens", LearnerOptions(seed=5, num_members=2, **options), stages(3, 1))


def test_each_member_of_an_ensemble_goes_on_from_its_own_weights():
    plans = ensemble_plans()
    assert plans[2].trainings == (
        Training(Model(2, 0), 5, Model(1, 0)),
        Training(Model(2, 1), member_seed(5, 1), Model(1, 1)),
    )
    assert plans[2].predictors == (Model(2, 0), Model(2, 1))
    assert {plan.combine for plan in plans} == {"probabilities"}


def test_an_ensemble_of_one_is_the_single_model():
    assert plan_stages("ens", LearnerOptions(seed=5), stages(3, 1)) == plan_stages(
        "sm", LearnerOptions(seed=5), stages(3, 1)
    )


def test_a_growing_ensemble_trains_new_members_only_and_predicts_with_all():
    plans = plan_stages("gens", LearnerOptions(seed=5, from_previous=False, num_members=2), stages(3, 1))
    assert [training.model for training in plans[1].trainings] == [Model(1, 2), Model(1, 3)]
    assert all(training.start is None for plan in plans for training in plan.trainings)
    assert plans[1].predictors == (Model(0, 0), Model(0, 1), Model(1, 2), Model(1, 3))
    seeds = [training.seed for plan in plans for training in plan.trainings]
    assert len(set(seeds)) == 6
    assert set(NeededModels(plans).after(1)) == set(plans[1].predictors)


def test_a_growing_ensemble_may_start_from_its_last_member():
    plans = plan_stages("gens", LearnerOptions(seed=5, num_members=2), stages(3, 1))
    assert [training.start for training in plans[2].trainings] == [Model(1, 3), Model(1, 3)]


def test_a_growing_mixture_follows_its_schedule():
    options = LearnerOptions(seed=5, grow_schedule=(4, 6, 6, 12), grow_method="split", grow_select="usage")
    trainings = [plan.trainings[0] for plan in plan_stages("gmoe", options, stages(4, 1))]
    assert [training.num_experts for training in trainings] == [4, None, None, None]
    assert [training.growth for training in trainings] == [
        None, Growth(2, "split", "usage", 6), None, Growth(6, "split", "usage", 8)
    ]  # fmt: skip
    assert [training.start for training in trainings] == [None, Model(0, 0), Model(1, 0), Model(2, 0)]


def test_a_uniform_mixture_is_one_model_of_several():
    plan = plan_stages("umix", LearnerOptions(seed=5, num_members=3), stages(2, 1))[1]
    assert plan.trainings == (Training(Model(1, 0), 5, Model(0, 0), num_joint=3),)
    assert plan.predictors == (Model(1, 0),)
