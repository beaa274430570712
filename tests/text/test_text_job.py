"""The commands of a stage on text."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fairseq_alma.learners.learner import stages
from tests.runs.runs import plan_learner
from tests.text.jobs import TRAIN, commands_of, make_job


def plans(wait=3):
    return plan_learner("sm", stages(4, wait), seed=5)


def has(arguments, *expected):
    """Return whether words follow one another in a command line."""
    return any(tuple(arguments[i : i + len(expected)]) == expected for i in range(len(arguments)))


def test_a_stage_trains_on_its_megabatches_and_is_tested_on_both_sets_by_stock_commands():
    train, *tests = commands_of(make_job("--wait", "3"), plans()[0])
    assert (train.program, train.arguments[0]) == ("fairseq-train", "S")
    assert has(train.arguments, "--task", "alma_lm", "--megabatch", "2", "--wait", "3", "--seed", "5")
    assert has(train.arguments, "--save-dir", "R/stage-000/member-0") and "--finetune-from-model" not in train.arguments
    assert has(train.arguments, "--keep-interval-updates", "1") and "--disable-validation" in train.arguments
    for test, split in zip(tests, ("valid", "test"), strict=True):
        assert test.program == "fairseq-eval-lm" and has(test.arguments, "--cpu", "--batch-size", "4")
        assert has(test.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--gen-subset", split)


def test_the_next_stage_starts_from_the_weights_of_the_one_before_and_the_user_s_options_come_last():
    train = commands_of(make_job("--wait", "3", words=(*TRAIN, "--log-interval", "3")), plans()[1])[0]
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_last.pt")
    assert has(train.arguments, "--megabatch", "3", "--wait", "3") and train.arguments[-2:] == ["--log-interval", "3"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (("--replay",), ("--replay",)),
        (("--save-every", "90s"), ("--save-interval-minutes", "1.5")),
        (("--save-every", "7"), ("--save-interval-updates", "7")),
        (("--finetune-from-model", "F.pt"), ("--finetune-from-model", "F.pt")),
    ],
)
def test_options_before_the_dashes_become_options_of_fairseq_train(own, expected):
    assert has(commands_of(make_job(*own), plans(1)[0])[0].arguments, *expected)


def test_the_first_stage_may_gather_more_megabatches():
    planned = plan_learner("sm", stages(5, 1, replay=True, first_wait=3))
    job = make_job("--replay", "--first-wait", "3")
    for plan, data in zip(planned, (("2", "--wait", "3"), ("3", "--wait", "1"), ("4", "--wait", "1")), strict=True):
        assert has(commands_of(job, plan)[0].arguments, "--megabatch", *data, "--replay")


def test_an_ensemble_trains_its_members_and_one_checkpoint_represents_them():
    plan = plan_learner("ens", stages(1, 1), num_members=2)[0]
    commands = commands_of(make_job("--learner", "ens"), plan)
    assert [each.program for each in commands] == ["fairseq-train"] * 2 + ["alma-ensemble"] + ["fairseq-eval-lm"] * 2
    members = [f"R/stage-000/member-{member}/checkpoint_last.pt" for member in (0, 1)]
    assert has(commands[2].arguments, *members, "--out", "R/stage-000/ensemble.pt", "--force")
    assert has(commands[3].arguments, "--path", "R/stage-000/ensemble.pt")


def test_a_mixture_grows_and_is_tested_before_it_is_trained():
    plan = plan_learner("gmoe", stages(2, 1), grow_schedule="4,6")[1]
    job = make_job("--learner", "gmoe", "--grow-schedule", "4,6")
    grow, after, train, *_ = commands_of(job, plan)
    assert (grow.program, after.program, train.program) == ("alma-grow", "fairseq-eval-lm", "fairseq-train")
    assert has(grow.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--out", "R/stage-001/grown.pt")
    assert has(grow.arguments, "--method", "copy", "--experts", "2") and has(grow.arguments, "--cpu")
    assert has(after.arguments, "--path", "R/stage-001/grown.pt", "--gen-subset", "valid")
    assert has(train.arguments, "--finetune-from-model", "R/stage-001/grown.pt")
    for schedule, experts, moments in (("1,2", "1", "share"), ("1,4", "3", "copy"), ("2,4", "2", "share")):
        plan = plan_learner("gmoe", stages(2, 1), grow_schedule=schedule, grow_method="split")[1]
        own = ("--learner", "gmoe", "--grow-schedule", schedule, "--carry-optimizer")
        grow = commands_of(make_job(*own), plan)[0].arguments
        assert has(grow, "--experts", experts) and has(grow, "--optimizer", moments)


def test_the_curves_of_each_training_have_their_own_folder_and_name():
    words = (*TRAIN, "--tensorboard-logdir", "tb", "--wandb-project", "p")
    first, second = commands_of(make_job(words=words), plans()[0])[0], commands_of(make_job(words=words), plans()[1])[0]
    run, names = make_job(words=words).folder.name, second.environment
    assert has(second.arguments, "--tensorboard-logdir", f"tb/{run}/stage-001/member-0")
    assert (names["WANDB_NAME"], names["WANDB_RUN_GROUP"]) == (f"{run}/stage-001/member-0", run)
    assert first.environment["WANDB_RUN_ID"] != names["WANDB_RUN_ID"]


def test_several_processes_train_together_and_one_tests():
    job = make_job("--num-procs", "2", words=(*TRAIN, "--update-freq", "4"))
    train, *tests = commands_of(job, plans()[0])
    assert train.num_procs == 2 and has(train.arguments, "--distributed-world-size", "2")
    assert has(train.arguments, "--update-freq", "2") and {test.num_procs for test in tests} == {1}
    assert str(train).startswith("for RANK in 0 1; do MASTER_ADDR=localhost") and str(train).endswith(" & done; wait")


def anytime(*own, words=()):
    words = ("--arch", "a", "--cpu", "--batch-size", "4", "--lr", "0.01", "--max-update", "100", *words)
    return commands_of(make_job(*own, words=words), plan_learner("sm", stages(2, 1))[1])


def test_a_carried_optimizer_continues_to_count_updates():
    train, *_ = anytime("--carry-optimizer")
    start = ("--continue-once", "R/stage-000/member-0/checkpoint_last.pt", "--continue-as", "stage")
    assert has(train.arguments, *start) and has(train.arguments, "--max-update", "200")


def test_a_learner_that_began_anew_counts_updates_from_there():
    job, planned = make_job("--carry-optimizer"), plan_learner("sm", stages(4, 1))
    (training,) = planned[2].trainings
    planned[2] = replace(planned[2], trainings=(replace(training, start=None),))
    job.learner = SimpleNamespace(plan=lambda stage: planned[stage.index])
    assert [job.first_update(*plan.trainings) for plan in planned] == [0, 1000, 0, 1000]


def test_a_copy_branches_off_is_decayed_and_tested_while_the_training_continues():
    words = ("--tensorboard-logdir", "tb")
    before, branch, rest, test, _ = anytime("--carry-optimizer", "--branch-share", "0.1", words=words)
    own, copied = "R/stage-001/member-0", "R/stage-001/member-0/branch"
    assert has(before.arguments, "--save-dir", own) and has(before.arguments, "--max-update", "180")
    start = ("--continue-once", f"{own}/checkpoint_last.pt", "--continue-as", "branch")
    assert has(branch.arguments, "--save-dir", copied) and has(branch.arguments, *start)
    assert has(branch.arguments, "--max-update", "200") and "--tensorboard-logdir" not in branch.arguments
    assert has(rest.arguments, "--save-dir", own) and has(rest.arguments, "--max-update", "200")
    assert has(test.arguments, "--path", f"{copied}/checkpoint_last.pt")


def test_an_average_or_the_best_checkpoint_predicts_and_the_next_stage_begins_with_the_best():
    _, average, test, _ = anytime("--ema-half-life", "1/16")
    assert average.program == "alma-ensemble" and "--average" in average.arguments
    assert has(test.arguments, "--path", "R/stage-001/member-0/checkpoint_average.pt")
    train, test, _ = anytime("--best-checkpoint")
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_best.pt")
    assert "--disable-validation" not in train.arguments
    assert has(test.arguments, "--path", "R/stage-001/member-0/checkpoint_best.pt")
    train, *_ = anytime("--best-checkpoint", "--carry-optimizer")
    assert has(train.arguments, "--continue-once", "R/stage-000/member-0/checkpoint_last.pt")
