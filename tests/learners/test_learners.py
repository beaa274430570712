import itertools
import math
from dataclasses import replace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import (
    LEARNERS,
    Growth,
    ModelId,
    StagePlan,
    Training,
    build_learner,
    member_seed,
    stage_ending_with,
    stages,
)
from fairseq_alma.runs.loop import NeededModels
from tests.runs.runs import plan_learner


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


def test_the_single_model_goes_on_from_the_stage_before():
    plans = plan_learner("sm", stages(3, 1), seed=5)
    assert [plan.trainings for plan in plans] == [
        (Training(ModelId(0, 0), 5, None),),
        (Training(ModelId(1, 0), 5, ModelId(0, 0)),),
        (Training(ModelId(2, 0), 5, ModelId(1, 0)),),
    ]
    assert [plan.predictors for plan in plans] == [(ModelId(0, 0),), (ModelId(1, 0),), (ModelId(2, 0),)]


def test_from_scratch_no_stage_needs_another():
    plans = plan_learner("sm", stages(3, 1), seed=5, init="scratch")
    assert all(training.start is None for plan in plans for training in plan.trainings)


def test_every_learner_trains_something_and_predicts_with_what_is_trained():
    schedules = {("text", "gmoe"): "4,6,8", ("text", "grow"): "layers=1,2,2", ("images", "grow"): "width=4,4,8"}
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


def test_only_the_weights_that_a_later_stage_starts_from_are_needed_and_the_last_ones():
    plans = plan_learner("sm", stages(3, 1))
    assert [set(NeededModels(plans).after(stage)) for stage in range(3)] == [{ModelId(stage, 0)} for stage in range(3)]


def test_models_that_predict_without_being_trained_again_are_needed():
    first, second = stages(2, 1)
    old, new = ModelId(0, 0), ModelId(1, 1)
    plans = [
        StagePlan(first, (Training(old, 1),), (old,)),
        StagePlan(second, (Training(new, 2),), (old, new), "probabilities"),
    ]
    assert set(NeededModels(plans).after(0)) == {old}
    assert set(NeededModels(plans).after(1)) == {old, new}


def ensemble_plans(**options):
    return plan_learner("ens", stages(3, 1), seed=5, num_members=2, **options)


def test_each_member_of_an_ensemble_goes_on_from_its_own_weights():
    plans = ensemble_plans()
    assert plans[2].trainings == (
        Training(ModelId(2, 0), 5, ModelId(1, 0)),
        Training(ModelId(2, 1), member_seed(5, 1), ModelId(1, 1)),
    )
    assert plans[2].predictors == (ModelId(2, 0), ModelId(2, 1))
    assert {plan.combine for plan in plans} == {"probabilities"}


def test_an_ensemble_of_one_is_the_single_model():
    assert plan_learner("ens", stages(3, 1), seed=5, num_members=1) == plan_learner("sm", stages(3, 1), seed=5)


def test_a_growing_ensemble_trains_new_members_only_and_predicts_with_all():
    plans = plan_learner("gens", stages(3, 1), seed=5, init="scratch", num_members=2)
    assert [training.model for training in plans[1].trainings] == [ModelId(1, 2), ModelId(1, 3)]
    assert all(training.start is None for plan in plans for training in plan.trainings)
    assert plans[1].predictors == (ModelId(0, 0), ModelId(0, 1), ModelId(1, 2), ModelId(1, 3))
    seeds = [training.seed for plan in plans for training in plan.trainings]
    assert len(set(seeds)) == 6
    assert set(NeededModels(plans).after(1)) == set(plans[1].predictors)


def test_a_growing_ensemble_may_start_from_its_last_member():
    plans = plan_learner("gens", stages(3, 1), seed=5, init="previous", num_members=2)
    assert [training.start for training in plans[2].trainings] == [ModelId(1, 3), ModelId(1, 3)]


def test_a_growing_mixture_follows_its_schedule():
    options = {"grow_schedule": "4,6,6,12", "grow_method": "split", "grow_select": "usage"}
    trainings = [plan.trainings[0] for plan in plan_learner("gmoe", stages(4, 1), seed=5, **options)]
    assert [training.num_experts for training in trainings] == [4, None, None, None]
    assert [training.growth for training in trainings] == [
        None, Growth(2, "split", "usage", 6), None, Growth(6, "split", "usage", 8)
    ]  # fmt: skip
    assert [training.start for training in trainings] == [None, ModelId(0, 0), ModelId(1, 0), ModelId(2, 0)]


@pytest.mark.parametrize(
    ("options", "layers", "growth"),
    [
        ({"grow_schedule": "layers=1,6,6"}, [1, 6, 6], [None, Growth(0, "zero", "loss", 6, sizes={"layers": 6}), None]),
        (
            {"grow_schedule": "layers=1,2,3", "grow_method": "last"},
            [1, 2, 3],
            [
                None,
                Growth(0, "last", "loss", 6, sizes={"layers": 2}),
                Growth(0, "last", "loss", 7, sizes={"layers": 3}),
            ],
        ),
        ({"grow_schedule": "experts=2,4,4"}, [None] * 3, [None, Growth(2, "split", "loss", 6), None]),
        (
            {"grow_schedule": " experts=2,2,3   layers=2,4,6", "grow_method": "copy"},
            [2, 4, 6],
            [
                None,
                Growth(0, "zero", "loss", 6, sizes={"layers": 4}),
                Growth(1, "copy", "loss", 7, sizes={"layers": 6}),
            ],
        ),
    ],
)
def test_layers_and_experts_grow_by_a_schedule(options, layers, growth):
    trainings = [plan.trainings[0] for plan in plan_learner("grow", stages(3, 1), seed=5, **options)]
    assert [training.sizes.get("--decoder-layers") for training in trainings] == layers
    assert [training.growth for training in trainings] == growth
    assert (trainings[0].num_experts is None) == ("experts" not in options["grow_schedule"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--learner grow needs --grow-schedule"),
        ({"grow_schedule": "4,6,8"}, "4,6,8: layers=1,6,6,6 is needed"),
        ({"grow_schedule": "layers=4,2,8"}, "shrinks from 4 to 2 layers before stage 1"),
        ({"grow_schedule": "layers=1,2 experts=2,2,2"}, "as many numbers of each are needed"),
        ({"grow_schedule": "layers=1,2"}, "2 numbers of layers, the run has 3 stages"),
        ({"grow_schedule": "embed-dim=16,24,24"}, "embed-dim: from 16 to 24, but it grows to whole multiples; give 32"),
        ({"grow_schedule": "ffn-dim=16,32,32", "grow_method": "zero"}, "there is one way to become wider"),
        ({"grow_schedule": "experts=2,5,5"}, "from 2 to 5 experts before stage 1, but each of the 2"),
        ({"grow_schedule": "layers=1,2,2", "grow_method": "split"}, "added by zero, last, interpolated"),
        ({"grow_schedule": "experts=1,2,2", "grow_method": "zero"}, "added by copy, split, scratch"),
    ],
)
def test_a_schedule_that_cannot_be_grown_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_learner("grow", stages(3, 1), seed=5, **options)


@pytest.mark.parametrize(
    ("name", "options", "given", "message"),
    [
        ("gmoe", {"grow_schedule": "2,3,3"}, {"--moe-freq": ("0",)}, "--moe-freq 0 after the -- leaves no layer"),
        ("gmoe", {"grow_schedule": "2,3,3"}, {"--decoder-layers": ("1",)}, "give 2 layers or more, or --moe-freq 1"),
        ("gmoe", {"grow_schedule": "2,3,3"}, {"--moe-freq": ("1",), "--decoder-layers": ("1",)}, None),
        ("gmoe", {"grow_schedule": "2,2,2"}, {"--moe-freq": ("0",)}, None),
        (
            "grow",
            {"grow_schedule": "experts=2,3,3 layers=1,1,2"},
            {},
            "every 2. layer has experts .* and 1 layers have",
        ),
        ("grow", {"grow_schedule": "experts=2,3,3 layers=1,2,2"}, {}, None),
        ("grow", {"grow_schedule": "layers=1,2,2", "grow_method": "interpolated"}, {}, "has 1; give multiples of 2"),
        ("grow", {"grow_schedule": "layers=2,4,5", "grow_method": "interpolated"}, {}, "has 5; give multiples of 2"),
        ("grow", {"grow_schedule": "layers=1,1,1", "grow_method": "interpolated"}, {}, None),
        ("grow", {"grow_schedule": "layers=1,2,3", "grow_method": "interpolated"}, {"--moe-freq": ("0",)}, None),
        ("grow", {"grow_schedule": "layers=1,2,3"}, {}, None),
    ],
)
def test_a_model_that_cannot_grow_by_its_schedule_is_refused(name, options, given, message):
    learner = build_learner(LEARNERS["text"][name], "text", 1, 1, options)
    if message is None:
        learner.check_model(given.get)
    else:
        with pytest.raises(ValueError, match=message):
            learner.check_model(given.get)


def test_networks_for_images_grow_by_a_schedule():
    schedule = "hidden-layers=1,2,2 width=16,64,64"
    trainings = [
        plan.trainings[0] for plan in plan_learner("grow", stages(3, 1), "images", seed=5, grow_schedule=schedule)
    ]
    assert trainings[0].sizes == {"--width": 16, "--hidden-layers": 1}
    assert [each.growth and each.growth.sizes for each in trainings] == [None, {"width": 64, "hidden-layers": 2}, None]
    with pytest.raises(ValueError, match="layers=1,2,2: width=1,6,6,6 is needed, or hidden-layers= or channels="):
        plan_learner("grow", stages(3, 1), "images", grow_schedule="layers=1,2,2")


def test_widths_grow_by_a_schedule_and_heads_with_them():
    schedule = "embed-dim=16,16,48 layers=1,2,2 ffn-dim=64,80,80"
    trainings = [plan.trainings[0] for plan in plan_learner("grow", stages(3, 1), seed=5, grow_schedule=schedule)]
    assert [(each.sizes["--decoder-embed-dim"], each.times_heads) for each in trainings] == [(16, 1), (16, 1), (48, 3)]
    assert [training.growth and training.growth.sizes for training in trainings] == [
        None, {"layers": 2, "ffn-dim": 80}, {"embed-dim": 48}
    ]  # fmt: skip


def auto(seen, schedule="layers=1,2,6"):
    options = {"grow_schedule": schedule, "grow_when": "auto"}
    return replace(build_learner(LEARNERS["text"]["grow"], "text", 5, 1, options), seen=seen)


def test_a_model_grows_by_itself_once_another_stage_promises_little():
    seen = ((1e9, 6.0), (2e9, 5.5), (3e9, 5.45), (6e9, 5.0), (9e9, 4.99))
    planned = stages(7, 1)
    plans = [auto(seen).plan(stage) for stage in planned]
    assert [plan.trainings[0].sizes["--decoder-layers"] for plan in plans] == [1, 1, 1, 2, 2, 6, 6]
    assert [bool(plan.trainings[0].growth) for plan in plans] == [False, False, False, True, False, True, False]
    gain = 100 * (5.5 - 5.45) * math.log(4 / 3) / math.log(3 / 2) / 5.45
    assert plans[3].reason == (
        "grows: loss on valid 5.5000, then 5.4500 bits after 2e+09 and 3e+09 FLOPs; "
        f"another stage promises {gain:.2f} %, less than 1%"
    )
    assert plans[2].reason.startswith("stays: ") and "not less than 1%" in plans[2].reason
    for number in range(6):  # a stage's plan depends on nothing that comes after it
        assert auto(seen[:number]).plan(planned[number]) == plans[number]


def test_what_grows_by_itself_takes_no_more_sizes_than_there_are_stages():
    auto(()).check_stages(stages(3, 1))
    with pytest.raises(ValueError, match="3 numbers of layers, the run has 2 stages"):
        auto(()).check_stages(stages(2, 1))


def test_a_growing_model_s_other_sizes_are_the_user_s():
    learner = build_learner(LEARNERS["text"]["grow"], "text", 5, 1, {"grow_schedule": "embed-dim=16,32"})
    assert {*learner.owned} == {"--decoder-embed-dim", "--gate-trees", "--decoder-sinusoidal-pos"}


def test_copies_of_experts_may_get_noise_on_their_gate_rows():
    plan = plan_learner("gmoe", stages(2, 1), seed=5, grow_schedule="4,6", grow_noise=0.01)[1]
    assert plan.trainings[0].growth == Growth(2, "copy", "loss", 6, noise=0.01)
    with pytest.raises(ValueError, match=r"--grow-noise 0\.01: goes with --grow-method copy alone"):
        plan_learner("gmoe", stages(2, 1), seed=5, grow_schedule="4,6", grow_noise=0.01, grow_method="split")


def test_a_uniform_mixture_is_one_model_of_several():
    plan = plan_learner("umix", stages(2, 1), seed=5, num_members=3)[1]
    assert plan.trainings == (Training(ModelId(1, 0), 5, ModelId(0, 0), num_joint=3),)
    assert plan.predictors == (ModelId(1, 0),)
