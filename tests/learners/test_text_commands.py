from pathlib import Path

from fairseq_alma.learners.run_folder import RunFolder
from fairseq_alma.learners.schedule import stages
from fairseq_alma.learners.strategy import LearnerOptions, plan_stages
from fairseq_alma.learners.text_commands import TextCommands
from fairseq_alma.learners.train_options import TrainOptions

TRAIN = ["--arch", "a", "--cpu", "--batch-size", "4"]


def commands(options=("--max-update", "1000"), **changes):
    settings = {"wait": 3, "replay": False, "save_every": 500, "validate": False, "keep_checkpoints": False, **changes}
    return TextCommands(Path("S"), RunFolder(Path("R")), TrainOptions([*TRAIN, *options]), **settings)


def plans(wait=3):
    return plan_stages("sm", LearnerOptions(seed=5), stages(4, wait))


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
