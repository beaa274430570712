from pathlib import Path

from fairseq_alma.learners.schedule import stages
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.text.text_commands import TextCommands
from fairseq_alma.text.train_options import TrainOptions
from tests.runs.runs import plan_learner

TRAIN = ["--arch", "a", "--cpu", "--batch-size", "4"]


def commands(options=("--max-update", "1000"), **changes):
    settings = {"wait": 3, "replay": False, "save_every": 500, "validate": False, "keep_checkpoints": False, **changes}
    return TextCommands(Path("S"), RunFolder(Path("R")), TrainOptions([*TRAIN, *options]), **settings)


def plans(wait=3):
    return plan_learner("sm", stages(4, wait), seed=5)


def has(arguments, *expected):
    """Whether words follow one another in a command line."""
    return any(tuple(arguments[i : i + len(expected)]) == expected for i in range(len(arguments)))


def test_a_stage_trains_on_its_megabatches_and_is_tested_on_both_sets():
    train, valid, test = commands().all_of(plans()[0])
    assert (train.program, valid.program, test.program) == ("fairseq-train", "fairseq-eval-lm", "fairseq-eval-lm")
    assert train.arguments[0] == "S"
    assert has(train.arguments, "--task", "alma_lm", "--megabatch", "2", "--wait", "3", "--seed", "5")
    assert has(train.arguments, "--save-dir", "R/stage-000/member-0")
    assert "--finetune-from-model" not in train.arguments
    assert has(valid.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--gen-subset", "valid")
    assert has(test.arguments, "--gen-subset", "test")
    assert has(test.arguments, "--cpu", "--batch-size", "4")


def test_the_next_stage_starts_from_the_weights_of_the_one_before():
    train = commands().train(plans()[1], plans()[1].trainings[0])
    assert has(train.arguments, "--finetune-from-model", "R/stage-000/member-0/checkpoint_last.pt")
    assert has(train.arguments, "--megabatch", "3", "--wait", "3")


def test_what_the_user_gives_comes_last_so_that_it_counts():
    arguments = (
        commands(("--max-update", "7", "--log-interval", "3")).train(plans()[0], plans()[0].trainings[0]).arguments
    )
    assert arguments[-2:] == ["--log-interval", "3"]


def test_replay_is_handed_on():
    assert "--replay" in commands(replay=True).train(plans()[0], plans()[0].trainings[0]).arguments


def test_the_last_epoch_is_saved_when_epochs_end_a_stage():
    arguments = commands(("--max-epoch", "7")).train(plans()[0], plans()[0].trainings[0]).arguments
    assert has(arguments, "--save-interval", "7")


def test_only_the_newest_checkpoint_within_a_stage_is_kept_unless_all_are():
    plan = plans()[0]
    assert has(commands().train(plan, plan.trainings[0]).arguments, "--keep-interval-updates", "1")
    assert "--keep-interval-updates" not in commands(keep_checkpoints=True).train(plan, plan.trainings[0]).arguments


def test_validation_in_training_is_off_unless_asked_for():
    plan = plans()[0]
    assert "--disable-validation" in commands().train(plan, plan.trainings[0]).arguments
    assert "--disable-validation" not in commands(validate=True).train(plan, plan.trainings[0]).arguments


def learner_plans(learner, num_megabatches=2, **options):
    return plan_learner(learner, stages(num_megabatches, 1), seed=5, **options)


def programs(plan):
    return [command.program for command in commands(wait=1).all_of(plan)]


def test_an_ensemble_trains_its_members_and_tests_the_one_checkpoint_that_stands_for_them():
    plan = learner_plans("ens", num_members=2)[1]
    assert programs(plan) == ["fairseq-train", "fairseq-train", "alma-ensemble", "fairseq-eval-lm", "fairseq-eval-lm"]
    first, second, join, valid, _ = commands(wait=1).all_of(plan)
    assert has(first.arguments, "--seed", "5", "--save-dir", "R/stage-001/member-0")
    assert has(second.arguments, "--seed", "10000005", "--save-dir", "R/stage-001/member-1")
    assert has(second.arguments, "--finetune-from-model", "R/stage-000/member-1/checkpoint_last.pt")
    members = [f"R/stage-001/member-{member}/checkpoint_last.pt" for member in range(2)]
    assert has(join.arguments, *members, "--out", "R/stage-001/ensemble.pt", "--force")
    assert has(valid.arguments, "--path", "R/stage-001/ensemble.pt", "--gen-subset", "valid")


def test_a_mixture_grows_before_it_is_trained_and_is_tested_right_after_growth_too():
    plan = learner_plans("gmoe", grow_schedule="4,6")[1]
    assert programs(plan) == ["alma-grow", "fairseq-train", "fairseq-eval-lm", "fairseq-eval-lm", "fairseq-eval-lm"]
    grow, train, grown, _, _ = commands(wait=1).all_of(plan)
    assert has(grow.arguments, "--path", "R/stage-000/member-0/checkpoint_last.pt", "--out", "R/stage-001/grown.pt")
    assert has(grow.arguments, "--method", "copy", "--experts", "2", "--seed", "6", "--select", "loss", "--stream", "S")
    assert has(grow.arguments, "--cpu", "--batch-size", "4")
    assert has(train.arguments, "--finetune-from-model", "R/stage-001/grown.pt")
    assert "--num-experts" not in train.arguments
    assert has(grown.arguments, "--path", "R/stage-001/grown.pt", "--gen-subset", "valid")


def test_a_mixture_begins_with_the_experts_of_its_schedule():
    plan = learner_plans("gmoe", grow_schedule="4,6")[0]
    assert commands(wait=1).train(plan, plan.trainings[0]).arguments[-2:] == ["--num-experts", "4"]


def test_new_random_experts_need_no_measuring():
    plan = learner_plans("gmoe", grow_schedule="4,6", grow_method="scratch")[1]
    grow = commands(wait=1).grow(plan.trainings[0])
    assert "--select" not in grow.arguments and "--stream" not in grow.arguments


def test_models_that_are_trained_jointly_become_members_of_one():
    options = ("--max-update", "7", "--num-experts", "4", "--decoder-sinusoidal-pos", "--dropout", "0.1")
    plan = learner_plans("umix", num_members=3)[0]
    arguments = commands(options, wait=1).train(plan, plan.trainings[0]).arguments
    assert has(arguments, "--arch", "alma_umix", "--num-members", "3", "--member-arch", "a")
    assert "--member-options=--num-experts 4 --decoder-sinusoidal-pos --dropout 0.1" in arguments
    assert not {"--num-experts", "--dropout"} & set(arguments)
    assert has(arguments, "--max-update", "7") and has(arguments, "--cpu", "--batch-size", "4")


def test_the_curves_of_each_training_have_a_folder_of_their_own():
    plan = learner_plans("ens", num_members=2)[1]
    with_curves = commands(("--max-update", "7", "--tensorboard-logdir=tb"), wait=1)
    first, second = (with_curves.train(plan, training).arguments for training in plan.trainings)
    assert has(first, "--tensorboard-logdir", "tb/R/stage-001/member-0")
    assert has(second, "--tensorboard-logdir", "tb/R/stage-001/member-1")
    assert "--tensorboard-logdir" not in with_curves.test(plan, "valid").arguments


def test_weights_and_biases_is_told_the_name_of_each_training():
    plan = learner_plans("sm")[1]
    train = commands(("--max-update", "7", "--wandb-project", "p"), wait=1).train(plan, plan.trainings[0])
    assert train.environment == {"WANDB_NAME": "R/stage-001/member-0", "WANDB_RUN_GROUP": "R"}
    assert commands(wait=1).train(plan, plan.trainings[0]).environment == {}


def test_several_processes_train_together_and_one_tests():
    options = ("--max-update", "7", "--update-freq", "4")
    train, *tests = commands(options, num_procs=2).all_of(plans()[0])
    assert train.num_procs == 2
    assert has(train.arguments, "--distributed-world-size", "2")
    assert all(test.num_procs == 1 and "--distributed-world-size" not in test.arguments for test in tests)
