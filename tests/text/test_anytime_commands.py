import pytest

from fairseq_alma.learners.schedule import stages
from fairseq_alma.training.anytime_options import AnytimeOptions
from tests.runs.runs import plan_learner
from tests.text.test_text_commands import commands, has

TRAIN = ("--max-update", "100", "--lr", "0.01")


def second_stage(learner="sm", **options):
    return plan_learner(learner, stages(3, 1), seed=5, **options)[1]


def anytime(*words, **given):
    return commands((*TRAIN, *words), wait=1, anytime=AnytimeOptions(**given))


def test_a_stage_that_carries_the_optimizer_on_goes_on_counting_updates():
    plan = second_stage()
    (train,) = anytime(carry_optimizer=True).trainings(plan, plan.trainings[0])
    start = "R/stage-000/member-0/checkpoint_last.pt"
    assert has(train.arguments, "--continue-once", start, "--continue-as", "stage")
    assert has(train.arguments, "--max-update", "200") and train.arguments.count("--max-update") == 1
    assert "--finetune-from-model" not in train.arguments


def test_a_first_stage_has_nothing_to_carry_on():
    plan = plan_learner("sm", stages(3, 1), seed=5)[0]
    (train,) = anytime(carry_optimizer=True).trainings(plan, plan.trainings[0])
    assert has(train.arguments, "--max-update", "100") and "--continue-once" not in train.arguments


@pytest.mark.parametrize(("method", "optimizer"), [("split", "share"), ("copy", "copy"), ("scratch", "copy")])
def test_the_optimizer_s_state_grows_with_the_model(method, optimizer):
    plan = second_stage("gmoe", grow_schedule="4,6,6", grow_method=method)
    grow = anytime(carry_optimizer=True).grow(plan.trainings[0])
    assert has(grow.arguments, "--optimizer", optimizer)
    assert "--optimizer" not in anytime().grow(plan.trainings[0]).arguments


def test_an_average_is_what_predicts():
    plan = second_stage("ens", num_members=2)
    with_average = anytime(carry_optimizer=True, ema_half_life="1/8")
    *trains, join, _, _ = with_average.all_of(plan)
    assert [each.program for each in trains] == ["fairseq-train", "alma-ensemble"] * 2
    assert all(has(train.arguments, "--ema-half-life", "1/8") for train in trains[::2])
    assert has(trains[1].arguments, "R/stage-001/member-0/checkpoint_last.pt", "--average", "--out")
    members = [f"R/stage-001/member-{member}/checkpoint_average.pt" for member in range(2)]
    assert has(join.arguments, *members, "--out")


def test_a_copy_branches_off_is_decayed_and_tested_while_the_training_goes_on():
    plan = second_stage()
    words = ("--tensorboard-logdir=tb",)
    first, branch, rest, valid, _ = anytime(*words, carry_optimizer=True, branch_decay=0.2).all_of(plan)
    own, copied = "R/stage-001/member-0", "R/stage-001/member-0/branch"
    assert has(first.arguments, "--save-dir", own) and has(first.arguments, "--max-update", "180")
    start = ("--continue-once", f"{own}/checkpoint_last.pt", "--continue-as", "branch")
    assert has(branch.arguments, "--save-dir", copied) and has(branch.arguments, *start)
    assert has(branch.arguments, "--branch-from", "180", "--branch-until", "200", "--branch-shape", "sqrt")
    assert has(branch.arguments, "--max-update", "200") and "--tensorboard-logdir" not in branch.arguments
    assert has(rest.arguments, "--save-dir", own) and has(rest.arguments, "--max-update", "200")
    assert "--branch-from" not in (*first.arguments, *rest.arguments)
    assert has(valid.arguments, "--path", f"{copied}/checkpoint_last.pt")


def test_a_branch_that_is_continued_is_the_end_of_the_training_itself():
    plan = second_stage()
    train, valid, _ = anytime(carry_optimizer=True, branch_decay=0.2, branch_continue=True).all_of(plan)
    assert has(train.arguments, "--branch-from", "180", "--branch-until", "200", "--branch-shape", "sqrt")
    assert has(valid.arguments, "--path", "R/stage-001/member-0/checkpoint_last.pt")


def test_the_best_checkpoint_predicts_and_the_next_stage_begins_with_it():
    plan = second_stage()
    train, valid, _ = anytime(best_checkpoint=True).all_of(plan)
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_best.pt")
    assert "--disable-validation" not in train.arguments
    assert has(valid.arguments, "--path", "R/stage-001/member-0/checkpoint_best.pt")
    train, _, _ = anytime(best_checkpoint=True, carry_optimizer=True).all_of(plan)
    assert has(train.arguments, "--continue-once", "R/stage-000/member-0/checkpoint_last.pt")


def test_replay_says_its_order_only_where_one_was_given():
    plan = second_stage()
    train, _, _ = anytime(replay_share=0.25).all_of(plan)
    assert has(train.arguments, "--replay-share", "0.25") and "--replay-order" not in train.arguments
    train, _, _ = anytime(replay_share=0.25, replay_order="least-seen").all_of(plan)
    assert has(train.arguments, "--replay-share", "0.25", "--replay-order", "least-seen")


def test_a_stage_re_warms_lower_than_the_one_before():
    words = ("--lr-scheduler", "polynomial_decay", "--total-num-update", "100")
    plan = second_stage()
    train, _, _ = anytime(*words, rewarm="one-schedule").all_of(plan)
    assert has(train.arguments, "--lr", "0.005")
