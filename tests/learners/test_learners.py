import itertools

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import (
    LEARNERS,
    Growth,
    ModelId,
    Stage,
    Training,
    build_learner,
    member_seed,
    stage_ending_with,
    stages,
)
from fairseq_alma.runs.loop import NeededModels, Run
from tests.runs.runs import plan_learner


@pytest.mark.parametrize(
    ("arguments", "options", "megabatches"),
    [
        ((4, 1), {}, [(0,), (1,), (2,), (3,)]),
        ((4, 3), {}, [(0, 1, 2), (3,)]),  # the last stage takes what is left
        ((4, 3), {"drop_rest": True}, [(0, 1, 2)]),  # as in Table 2
        ((2, 5), {"drop_rest": True}, []),
        ((5, 2), {"replay": True}, [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4)]),
    ],
)
def test_a_stage_trains_on_new_mega_batches_or_with_replay_on_all(arguments, options, megabatches):
    assert [stage.megabatches for stage in stages(*arguments, **options)] == megabatches


def test_a_stage_is_found_by_its_last_megabatch():
    assert [stage_ending_with(end, 4, wait=3).megabatches for end in (2, 3)] == [(0, 1, 2), (3,)]
    assert stage_ending_with(3, 4, wait=2, replay=True).megabatches == (0, 1, 2, 3)
    for (end, of_all, wait), ends in (((1, 4, 3), "2, 3"), ((500, 500, 1), "0, 1, 2, …, 499")):
        with pytest.raises(AlmaError, match=rf"--megabatch {end} --wait {wait}.*give one of {ends}$"):
            stage_ending_with(end, of_all, wait)


def test_the_single_model_starts_from_the_stage_before():
    plans = plan_learner("sm", stages(3, 1), seed=5)
    models = [ModelId(stage, 0) for stage in range(3)]
    starts = [None, *models[:2]]
    assert [plan.trainings for plan in plans] == [(Training(models[t], 5, starts[t]),) for t in range(3)]
    assert [plan.predictors for plan in plans] == [(model,) for model in models]


def test_every_learner_trains_a_model_and_predicts_with_trained_models():
    schedules = {("text", "gmoe"): "4,6,8", ("text", "grow"): "layers=1,2,2"}
    for kind, name in [(kind, name) for kind, learners in LEARNERS.items() for name in learners]:
        trained = set()
        options = {"grow_schedule": schedules[kind, name]} if (kind, name) in schedules else {}
        for plan in plan_learner(name, stages(5, 2), kind, **options):
            trained |= {training.model for training in plan.trainings}
            assert plan.trainings
            assert set(plan.predictors) <= trained


def test_member_zero_has_the_seed_of_the_run_and_no_two_updates_share_one():
    assert member_seed(3, 0) == 3
    updates = 1_000_000
    firsts = sorted(member_seed(3, member) for member in range(2000))
    assert all(b - a >= updates for a, b in itertools.pairwise(firsts))
    assert max(member_seed(9_999_999, member) for member in range(2000)) + updates < 2**32


def test_each_member_of_an_ensemble_starts_from_its_own_weights():
    plans = plan_learner("ens", stages(3, 1), seed=5, num_members=2)
    second = Training(ModelId(2, 1), member_seed(5, 1), ModelId(1, 1))
    assert plans[2].trainings == (Training(ModelId(2, 0), 5, ModelId(1, 0)), second)
    assert plans[2].predictors == (ModelId(2, 0), ModelId(2, 1))
    assert {plan.combine for plan in plans} == {"probabilities"}


def test_a_growing_ensemble_trains_new_members_only_and_predicts_with_all():
    plans = plan_learner("gens", stages(3, 1), seed=5, init="scratch", num_members=2)
    assert [training.model for training in plans[1].trainings] == [ModelId(1, 2), ModelId(1, 3)]
    assert all(training.start is None for plan in plans for training in plan.trainings)
    assert plans[1].predictors == (ModelId(0, 0), ModelId(0, 1), ModelId(1, 2), ModelId(1, 3))
    assert len({training.seed for plan in plans for training in plan.trainings}) == 6
    assert set(NeededModels(Run(None, plans, None)).after(1)) == set(plans[1].predictors)
    plans = plan_learner("gens", stages(3, 1), seed=5, init="previous", num_members=2)
    assert [training.start for training in plans[2].trainings] == [ModelId(1, 3), ModelId(1, 3)]


def test_a_growing_mixture_follows_its_schedule():
    options = {"grow_schedule": "4,6,6,12", "grow_method": "split", "grow_select": "usage"}
    trainings = [plan.trainings[0] for plan in plan_learner("gmoe", stages(4, 1), seed=5, **options)]
    assert [dict(training.sizes) for training in trainings] == [{"--num-experts": "4"}, {}, {}, {}]
    growths = [None, Growth(2, "split", "usage", 6), None, Growth(6, "split", "usage", 8)]
    assert [training.growth for training in trainings] == growths
    assert [training.start for training in trainings] == [None, ModelId(0, 0), ModelId(1, 0), ModelId(2, 0)]


@pytest.mark.parametrize(
    ("options", "layers", "growth"),
    [
        ({"grow_schedule": "layers=1,6,6"}, [1, 6, 6], [None, Growth(0, "split", "loss", 6, layers=6), None]),
        (
            {"grow_schedule": " experts=2,2,3   layers=2,4,6", "grow_method": "copy"},
            [2, 4, 6],
            [None, Growth(0, "copy", "loss", 6, layers=4), Growth(1, "copy", "loss", 7, layers=6)],
        ),
    ],
)
def test_layers_and_experts_grow_by_a_schedule(options, layers, growth):
    trainings = [plan.trainings[0] for plan in plan_learner("grow", stages(3, 1), seed=5, **options)]
    assert [int(dict(training.sizes)["--decoder-layers"]) for training in trainings] == layers
    assert [training.growth for training in trainings] == growth
    assert ("--num-experts" in dict(trainings[0].sizes)) == ("experts" in options["grow_schedule"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--learner grow: --grow-schedule is missing"),
        ({"grow_schedule": "4,6,8"}, "expected layers=SIZES, .*, found 4,6,8"),
        ({"grow_schedule": "layers=1,2 experts=2,2,2"}, "expected lists of equal length, one number per stage"),
        ({"grow_schedule": "layers=1,2"}, "numbers of layers for 3 stages, found 2 numbers"),
        ({"grow_schedule": "experts=2,5,5"}, "grows from 2 to 5 experts before stage 1, but a growth step"),
    ],
)
def test_a_schedule_that_cannot_be_grown_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_learner("grow", stages(3, 1), seed=5, **options)


@pytest.mark.parametrize(
    ("name", "schedule", "given", "is_refused"),
    [
        ("gmoe", "2,3,3", {"--moe-freq": ("0",)}, True),
        ("gmoe", "2,3,3", {"--moe-freq": ("1",), "--decoder-layers": ("1",)}, False),
        ("grow", "experts=2,3,3 layers=1,1,2", {}, True),
        ("grow", "experts=2,3,3 layers=1,2,2", {}, False),
    ],
)
def test_experts_are_not_added_where_no_layer_has_any(name, schedule, given, is_refused):
    learner = build_learner(LEARNERS["text"][name], "text", 1, 1, {"grow_schedule": schedule})
    if not is_refused:
        learner.check_model(given.get)
        return
    with pytest.raises(ValueError, match="no layer has experts"):
        learner.check_model(given.get)


def test_copies_of_experts_may_get_noise_on_their_gate_rows():
    plan = plan_learner("gmoe", stages(2, 1), seed=5, grow_schedule="4,6", grow_noise=0.01)[1]
    assert plan.trainings[0].growth == Growth(2, "copy", "loss", 6, noise=0.01)
    with pytest.raises(ValueError, match=r"--grow-noise 0\.01: requires --grow-method copy"):
        plan_learner("gmoe", stages(2, 1), seed=5, grow_schedule="4,6", grow_noise=0.01, grow_method="split")


def test_a_uniform_mixture_is_one_model_of_several():
    plan = plan_learner("umix", stages(2, 1), "images", seed=5, num_members=3)[1]
    assert plan.trainings == (Training(ModelId(1, 0), 5, ModelId(0, 0), num_joint=3),)
    assert plan.predictors == (ModelId(1, 0),)


def test_a_model_grows_after_a_longer_first_stage():
    due = [LEARNERS["images"]["gmoe"](seed=1, grow_every=n).is_due(Stage(1, (3,), (3,))) for n in (2, 4)]
    assert due == [True, False]
