import sys
from pathlib import Path

import pytest

from fairseq_alma.learners.learner import stages
from fairseq_alma.runs.run_folder import RunFolder
from tests.runs.runs import plan_learner
from tests.text.jobs import TRAIN, commands_of, make_job

PYTHON = Path(sys.executable).name


def plans(wait=3):
    return plan_learner("sm", stages(4, wait), seed=5)


def has(arguments, *expected):
    """Whether words follow one another in a command line."""
    return any(tuple(arguments[i : i + len(expected)]) == expected for i in range(len(arguments)))


def first(*own, plan=None, words=()):
    """The first command of a stage."""
    return commands_of(make_job(*own, words=(*TRAIN, *words)), plan or plans()[0])[0]


def test_a_stage_trains_on_its_megabatches_and_is_tested_on_both_sets():
    train, test = commands_of(make_job("--wait", "3"), plans()[0])
    assert (train.program, test.program) == ("fairseq-train", PYTHON)
    assert train.arguments[0] == "S"
    assert has(train.arguments, "--task", "alma_lm", "--megabatch", "2", "--wait", "3", "--seed", "5")
    assert has(train.arguments, "--save-dir", "R/stage-000/member-0")
    assert "--finetune-from-model" not in train.arguments
    assert has(test.arguments, "-m", "fairseq_alma.text.split_losses", "S")
    assert has(test.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--gen-subset", "valid,test")
    assert has(test.arguments, "--cpu", "--batch-size", "4")


def test_the_next_stage_starts_from_the_weights_of_the_one_before():
    train = first("--wait", "3", plan=plans()[1])
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_last.pt")
    assert has(train.arguments, "--megabatch", "3", "--wait", "3")


def test_what_the_user_gives_comes_last_so_that_it_counts():
    assert first(words=("--log-interval", "3")).arguments[-2:] == ["--log-interval", "3"]


@pytest.mark.parametrize(
    ("own", "words", "expected", "left_out"),
    [
        ((), (), ("--keep-interval-updates", "1"), ""),
        (("--keep-checkpoints",), (), (), "--keep-interval-updates"),
        ((), (), ("--disable-validation",), "--replay"),
        (("--validate",), (), (), "--disable-validation"),
        (("--replay",), (), ("--replay",), ""),
        (("--replay-share", "0.25"), (), ("--replay-share", "0.25"), "--replay-order"),
        (("--replay-share", "0.25", "--replay-order", "least-seen"), (), ("--replay-order", "least-seen"), ""),
        ((), ("--max-epoch", "7"), ("--save-interval", "7"), ""),  # so that there is a checkpoint when epochs end it
        ((), (), ("--save-interval-updates", "500"), "--save-interval-minutes"),
        (("--save-every", "7"), (), ("--save-interval-updates", "7"), "--save-interval-minutes"),
        (("--save-every", "90s"), (), ("--save-interval-minutes", "1.5"), "--save-interval-updates"),
        (("--save-every", "2h"), (), ("--save-interval-minutes", "120"), "--save-interval-updates"),
    ],
)
def test_an_option_says_what_fairseq_train_gets_and_what_it_does_not(own, words, expected, left_out):
    arguments = first(*own, words=words).arguments
    assert has(arguments, *expected) and left_out not in arguments


def learner_plans(learner, num_megabatches=2, **options):
    return plan_learner(learner, stages(num_megabatches, 1), seed=5, **options)


def programs(plan):
    return [command.program for command in commands_of(make_job(), plan)]


def test_an_ensemble_trains_its_members_and_tests_the_one_checkpoint_that_stands_for_them():
    plan = learner_plans("ens", num_members=2)[1]
    assert programs(plan) == ["fairseq-train", "fairseq-train", "alma-ensemble", PYTHON]
    first, second, join, test = commands_of(make_job(), plan)
    assert has(first.arguments, "--seed", "5", "--save-dir", "R/stage-001/member-0")
    assert has(second.arguments, "--seed", "10000005", "--save-dir", "R/stage-001/member-1")
    assert has(second.arguments, "--finetune-from-model", "R/stage-000/member-1/checkpoint_last.pt")
    members = [f"R/stage-001/member-{member}/checkpoint_last.pt" for member in range(2)]
    assert has(join.arguments, *members, "--out", "R/stage-001/ensemble.pt", "--force")
    assert has(test.arguments, "--path", "R/stage-001/ensemble.pt", "--gen-subset", "valid,test")
    assert has(test.arguments, "--out", "R/stage-001/ensemble-predictions.npz")


def test_an_ensemble_that_grows_begins_with_that_of_the_stage_before():
    plans = learner_plans("gens", num_megabatches=3)
    both, third = (commands_of(make_job(), plan)[1:] for plan in plans[1:])
    assert "--extend" not in both[0].arguments  # after the first stage there is one model
    new = "R/stage-002/member-2/checkpoint_last.pt"
    assert third[0].arguments[:3] == [new, "--extend", "R/stage-001/ensemble.pt"]
    assert has(third[1].arguments, "--known", "R/stage-001/ensemble-predictions.npz")


def test_what_is_tested_by_one_command_is_printed_for_one_split_too(capsys):
    make_job("--dry-run").print_plan(plans()[:1], RunFolder(Path("R")))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("# one split by hand: fairseq-eval-lm S ") and "--gen-subset test" in last


def test_a_mixture_grows_before_it_is_trained_and_is_tested_right_after_growth_too():
    plan = learner_plans("gmoe", grow_schedule="4,6")[1]
    assert programs(plan) == ["alma-grow", "fairseq-train", "fairseq-eval-lm", PYTHON]
    grow, train, grown, _ = commands_of(make_job(), plan)
    assert has(grow.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--out", "R/stage-001/grown.pt")
    assert has(grow.arguments, "--method", "copy", "--experts", "2", "--seed", "6", "--select", "loss", "--stream", "S")
    assert has(grow.arguments, "--cpu", "--batch-size", "4")
    assert has(train.arguments, "--finetune-from-model", "R/stage-001/grown.pt")
    assert "--num-experts" not in train.arguments
    assert has(grown.arguments, "--path", "R/stage-001/grown.pt", "--gen-subset", "valid")


def test_layers_grow_before_the_training_that_is_told_of_them():
    plan = learner_plans("grow", grow_schedule="layers=1,6 experts=2,3")[1]
    assert programs(plan) == ["alma-grow", "fairseq-train", "fairseq-eval-lm", PYTHON]
    grow, train, *_ = commands_of(make_job(), plan)
    assert has(
        grow.arguments, "--method", "split", "--experts", "1", "--layers", "6", "--seed", "6", "--select", "loss"
    )
    assert has(train.arguments, "--finetune-from-model", "R/stage-001/grown.pt")
    assert train.arguments[-2:] == ["--decoder-layers", "6"]
    grow = commands_of(make_job(), learner_plans("grow", grow_schedule="layers=1,6")[1])[0]
    assert has(grow.arguments, "--layers", "6", "--seed", "6")
    assert not {"--select", "--experts", "--method"} & {*grow.arguments}


def test_a_mixture_begins_with_the_experts_of_its_schedule():
    plan = learner_plans("gmoe", grow_schedule="4,6")[0]
    assert first(plan=plan).arguments[-2:] == ["--num-experts", "4"]


def test_new_random_experts_need_no_measuring():
    plan = learner_plans("gmoe", grow_schedule="4,6", grow_method="scratch")[1]
    grow = first(plan=plan)
    assert grow.program == "alma-grow"
    assert "--select" not in grow.arguments and "--stream" not in grow.arguments


def test_the_curves_of_each_training_have_a_folder_of_their_own():
    plan = learner_plans("ens", num_members=2)[1]
    one, two, _, test = commands_of(make_job(words=(*TRAIN, "--tensorboard-logdir=tb")), plan)
    assert has(one.arguments, "--tensorboard-logdir", "tb/R/stage-001/member-0")
    assert has(two.arguments, "--tensorboard-logdir", "tb/R/stage-001/member-1")
    assert "--tensorboard-logdir" not in test.arguments


def test_weights_and_biases_is_told_the_name_of_each_training():
    plan = learner_plans("sm")[1]
    train = first(plan=plan, words=("--wandb-project", "p"))
    assert train.environment == {"WANDB_NAME": "R/stage-001/member-0", "WANDB_RUN_GROUP": "R"}
    assert first(plan=plan).environment == {}


def test_several_processes_train_together_and_one_tests():
    train, test = commands_of(make_job("--num-procs", "2", words=(*TRAIN, "--update-freq", "4")), plans()[0])
    assert train.num_procs == 2
    assert has(train.arguments, "--distributed-world-size", "2")
    assert test.num_procs == 1 and "--distributed-world-size" not in test.arguments


def second_stage(learner="sm", **options):
    return plan_learner(learner, stages(3, 1), seed=5, **options)[1]


def anytime(*own, plan=None, words=()):
    job = make_job(*own, words=(*TRAIN[:-1], "100", "--lr", "0.01", *words))
    return commands_of(job, plan or second_stage())


def test_a_stage_that_carries_the_optimizer_on_goes_on_counting_updates():
    train, *_ = anytime("--carry-optimizer")
    start = "R/stage-000/member-0/checkpoint_last.pt"
    assert has(train.arguments, "--continue-once", start, "--continue-as", "stage")
    assert train.arguments.count("--continue-as") == 1  # the last one counts
    assert has(train.arguments, "--max-update", "200") and train.arguments.count("--max-update") == 1
    assert "--finetune-from-model" not in train.arguments and train.arguments.count("--continue-as") == 1


def test_a_first_stage_has_nothing_to_carry_on():
    train, *_ = anytime("--carry-optimizer", plan=plan_learner("sm", stages(3, 1), seed=5)[0])
    assert has(train.arguments, "--max-update", "100") and "--continue-once" not in train.arguments


@pytest.mark.parametrize(("method", "optimizer"), [("split", "share"), ("copy", "copy"), ("scratch", "copy")])
def test_the_optimizer_s_state_grows_with_the_model(method, optimizer):
    plan = second_stage("gmoe", grow_schedule="4,6,6", grow_method=method)
    assert has(anytime("--carry-optimizer", plan=plan)[0].arguments, "--optimizer", optimizer)
    assert "--optimizer" not in anytime(plan=plan)[0].arguments


def test_an_average_is_what_predicts():
    plan = second_stage("ens", num_members=2)
    *trains, join, _ = anytime("--carry-optimizer", "--ema-half-life", "1/8", plan=plan)
    assert [each.program for each in trains] == ["fairseq-train", "alma-ensemble"] * 2
    assert all(has(train.arguments, "--ema-half-life", "1/8") for train in trains[::2])
    assert has(trains[1].arguments, "R/stage-001/member-0/checkpoint_last.pt", "--average", "--out")
    members = [f"R/stage-001/member-{member}/checkpoint_average.pt" for member in range(2)]
    assert has(join.arguments, *members, "--out")


def test_a_copy_branches_off_is_decayed_and_tested_while_the_training_goes_on():
    own = ("--carry-optimizer", "--branch-decay", "0.2")
    before, branch, rest, test = anytime(*own, words=("--tensorboard-logdir=tb",))
    own, copied = "R/stage-001/member-0", "R/stage-001/member-0/branch"
    assert has(before.arguments, "--save-dir", own) and has(before.arguments, "--max-update", "180")
    start = ("--continue-once", f"{own}/checkpoint_last.pt", "--continue-as", "branch")
    assert has(branch.arguments, "--save-dir", copied) and has(branch.arguments, *start)
    assert has(branch.arguments, "--branch-from", "180", "--branch-until", "200", "--branch-shape", "sqrt")
    assert has(branch.arguments, "--max-update", "200") and "--tensorboard-logdir" not in branch.arguments
    assert has(rest.arguments, "--save-dir", own) and has(rest.arguments, "--max-update", "200")
    assert "--branch-from" not in (*before.arguments, *rest.arguments)
    assert has(test.arguments, "--path", f"{copied}/checkpoint_last.pt")


@pytest.mark.parametrize(("share", "first"), [("0.2", 160), ("0.9", 101)])  # 180 of 200: more than the stage has
def test_a_branch_takes_a_share_of_all_updates_so_far_but_no_more_than_those_of_the_stage(share, first):
    before, branch, rest, *_ = anytime("--carry-optimizer", "--branch-share", share)
    assert [has(each.arguments, "--max-update", str(end)) for each, end in ((before, first), (rest, 200))] == [True] * 2
    assert has(branch.arguments, "--branch-from", str(first), "--branch-until", "200", "--branch-shape", "sqrt")
    continued, *_ = anytime("--carry-optimizer", "--branch-share", share, "--branch-continue")
    assert has(continued.arguments, "--branch-from", str(160 if share == "0.2" else 100), "--branch-until", "200")


def test_a_branch_that_is_continued_is_the_end_of_the_training_itself():
    train, test = anytime("--carry-optimizer", "--branch-decay", "0.2", "--branch-continue")
    assert has(train.arguments, "--branch-from", "180", "--branch-until", "200", "--branch-shape", "sqrt")
    assert has(test.arguments, "--path", "R/stage-001/member-0/checkpoint_last.pt")


def test_the_best_checkpoint_predicts_and_the_next_stage_begins_with_it():
    train, test = anytime("--best-checkpoint")
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_best.pt")
    assert "--disable-validation" not in train.arguments
    assert has(test.arguments, "--path", "R/stage-001/member-0/checkpoint_best.pt")
    train, _ = anytime("--best-checkpoint", "--carry-optimizer")
    assert has(train.arguments, "--continue-once", "R/stage-000/member-0/checkpoint_last.pt")


def test_a_stage_re_warms_lower_than_the_one_before():
    words = ("--lr-scheduler", "polynomial_decay", "--total-num-update", "100")
    train, _ = anytime("--rewarm", "one-schedule", words=words)
    assert has(train.arguments, "--lr", "0.005")
