from argparse import Namespace

import pytest

from fairseq_alma.learners.learner import stages
from fairseq_alma.text.train_options import TrainOptions
from fairseq_alma.training.feature import Features
from fairseq_alma.training.planned_run import PlannedRun
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
        ({"ema_half_life": "1/8", "branch_share": 0.2}, "--ema-half-life 1/8: --branch-share 0.2 also decides"),
        ({"branch_share": 0.2, "best_checkpoint": True}, "--branch-share 0.2: --best-checkpoint also decides"),
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
        (CARRY, ["--lr-scheduler", "cosine"], "--lr-scheduler cosine does not span several stages"),
        (CARRY, ["--max-epoch", "2"], "--carry-optimizer: counts the updates of a stage; give --max-update"),
        (CARRY, ["--lr", "0.1,0.2"], "--lr 0.1,0.2 depends on the epoch"),
        (CARRY, ["--lr", "0.1", "--force-anneal", "2"], "--force-anneal depends on the epoch"),
        ({"branch_share": 0.2}, ["--max-epoch", "2"], "--branch-share: counts the updates"),
        ({"branch_share": 0.1, **CARRY}, [*DECAY, "400"], "--branch-share 0.1: --lr-scheduler polynomial_decay"),
        ({"replay_share": 0.2}, ["--max-epoch", "2"], r"--replay-share 0.2: counts the updates"),
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
    with pytest.raises(ValueError, match="--carry-optimizer: the state of --optimizer sgd cannot grow with a model"):
        check(CARRY, sgd, plans("gmoe", grow_schedule="4,4,6,6"))
