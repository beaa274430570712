from argparse import Namespace

import pytest

from fairseq_alma.learners.learner import stages
from fairseq_alma.text.train_options import TrainOptions
from fairseq_alma.training.carried_optimizer import Rewarm
from fairseq_alma.training.feature import Features, PlannedRun
from tests.runs.runs import plan_learner

CARRY = {"carry_optimizer": True}
DECAY = ["--lr-scheduler", "polynomial_decay", "--total-num-update"]


def plans(learner="sm", num=4, **options):
    return plan_learner(learner, stages(num, 1), **options)


def features(**given):
    return Features.read(Namespace(**given))


def check(given, words=(), planned=None, replay=False):
    options = TrainOptions(["--arch", "a", "--optimizer", "adam", "--max-update", "100", *words])
    found = features(**given)
    found.check(PlannedRun("text", planned or plans(), replay, options.last, found))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"branch_shape": "sqrt"}, "--branch-shape: means nothing without --branch-decay"),
        ({"branch_continue": True}, "--branch-continue: means nothing without --branch-decay"),
        ({"replay_order": "least-seen"}, "--replay-order: means nothing without --replay-share"),
        ({"ema_half_life": "1/8", "branch_decay": 0.2}, "--ema-half-life 1/8: --branch-decay is another way"),
        ({"branch_share": 0.2, "branch_decay": 0.2, **CARRY}, "--branch-share: --branch-decay says another way"),
        (
            {"branch_share": 0.2},
            "--branch-share: counts the updates of all stages, which are one training with --carry",
        ),
        ({"branch_share": 0.2, "best_checkpoint": True}, "--branch-share: --best-checkpoint is another way"),
        ({"branch_decay": 0.2, "best_checkpoint": True}, "--branch-decay: --best-checkpoint is another way"),
        ({"rewarm": "one-schedule", **CARRY}, "--rewarm one-schedule: --carry-optimizer warms up once"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check(given)


def test_what_has_nothing_to_carry_on_is_refused():
    check(CARRY, planned=plans(num=1))  # to which others may be appended
    with pytest.raises(ValueError, match="--carry-optimizer: each stage begins with new weights"):
        check(CARRY, planned=plans("gens"))
    check(CARRY)


def test_a_share_of_replay_goes_with_neither_replay_of_all_nor_one_stage():
    with pytest.raises(ValueError, match=r"--replay-share 0.2: --replay trains on all"):
        check({"replay_share": 0.2}, replay=True)
    with pytest.raises(ValueError, match=r"--replay-share 0.2: there is one stage"):
        check({"replay_share": 0.2}, planned=plans(num=1))


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        (CARRY, [*DECAY, "399"], "--total-num-update 399 after the --, and the 4 stages make 400 updates"),
        (CARRY, ["--lr-scheduler", "cosine"], "--lr-scheduler cosine after the -- knows no stream"),
        (CARRY, ["--max-epoch", "2"], "--carry-optimizer: counts the updates of a stage; give --max-update"),
        (CARRY, ["--lr", "0.1,0.2"], "--lr 0.1,0.2 after the -- depends on the epoch"),
        (CARRY, ["--lr", "0.1", "--force-anneal", "2"], "--force-anneal after the -- depends on the epoch"),
        ({"branch_decay": 0.2}, [*DECAY, "400"], "--lr-scheduler polynomial_decay after the -- decays by itself"),
        ({"branch_decay": 0.2}, ["--max-epoch", "2"], "--branch-decay: counts the updates"),
        ({"branch_share": 0.1, **CARRY}, [*DECAY, "400"], "--branch-share 0.1: --lr-scheduler polynomial_decay"),
        ({"replay_share": 0.2}, ["--max-epoch", "2"], r"--replay-share 0.2: counts the updates"),
        ({"rewarm": "one-schedule"}, [*DECAY, "400"], "--rewarm one-schedule: needs --lr-scheduler polynomial_decay"),
        ({"rewarm": "one-schedule"}, [*DECAY, "100", "--end-learning-rate", "1"], "--end-learning-rate of 0"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(given, words, message):
    with pytest.raises(ValueError, match=message) as error:
        check(given, words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [[], ["--lr-scheduler", "inverse_sqrt"], [*DECAY, "400"]])
def test_schedules_without_an_end_and_those_that_last_for_the_stream_are_carried_on(words):
    check(CARRY, words)


def test_an_optimizer_that_cannot_grow_is_refused_where_the_model_grows():
    sgd = ["--optimizer", "sgd"]
    check(CARRY, sgd)
    with pytest.raises(ValueError, match="--carry-optimizer: the state of --optimizer sgd is not known to grow"):
        check(CARRY, sgd, plans("gmoe", grow_schedule="4,4,6,6"))


def test_a_stage_re_warms_to_where_one_schedule_over_all_stages_would_be():
    options = Rewarm("one-schedule")
    for stage in range(3):
        total = (stage + 1) * 100
        value = 1 - (stage * 100 + 10 - 10) / (total - 10)  # of polynomial_decay, at update stage * 100 + 10
        assert options.peak(stage, 100, 10) == pytest.approx(value)
    assert options.peak(2, 100, 10, power=2) == pytest.approx(options.peak(2, 100, 10) ** 2)
    assert Rewarm().peak(2, 100, 10) == 1.0


def test_a_run_without_these_options_has_the_record_it_always_had():
    assert features().record() == {}
    assert features(branch_decay=0.2).record() == {"branch_decay": 0.2, "branch_shape": "sqrt"}
