from argparse import Namespace

import pytest

from fairseq_alma.learners.learner import stages
from fairseq_alma.text.train_options import TrainOptions
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
    found.check(PlannedRun("text", planned or plans(), replay, options.last))


def test_an_optimizer_without_a_successor_is_rejected():
    check(CARRY, planned=plans(num=1))  # a single stage may get successors
    with pytest.raises(ValueError, match="--carry-optimizer: the learner starts each stage with new weights"):
        check(CARRY, planned=plans("gens"))


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ({"branch_share": 0.2, "best_checkpoint": True}, [], "--branch-share 0.2: --best-checkpoint also selects"),
        (CARRY, [*DECAY, "399"], "at least 400 for 4 stages, found 399"),
        (CARRY, ["--lr-scheduler", "cosine"], "cosine is not supported; give fixed or inverse_sqrt, or poly"),
        (CARRY, ["--max-epoch", "2"], "--carry-optimizer: needs a fixed number of updates per stage; give"),
        (CARRY, ["--lr", "0.1,0.2"], "--lr 0.1,0.2 depends on the epoch"),
        (CARRY, ["--lr", "0.1", "--force-anneal", "2"], "--force-anneal depends on the epoch.*; omit --force"),
        ({"branch_share": 0.2}, ["--max-epoch", "2"], "--branch-share: needs a fixed number of updates"),
        ({"branch_share": 0.1, **CARRY}, [*DECAY, "400"], "--branch-share 0.1: --lr-scheduler polynomial_decay"),
    ],
)
def test_unsuitable_schedules_are_rejected(given, words, message):
    with pytest.raises(ValueError, match=message) as error:
        check(given, words)
    assert "\n" not in str(error.value)
    check(CARRY, [*DECAY, "400"])


def test_an_optimizer_without_growth_is_rejected_for_a_growing_model():
    sgd = ["--optimizer", "sgd"]
    check(CARRY, sgd)
    with pytest.raises(ValueError, match="--optimizer sgd after --: a model that grows and carries its optimizer"):
        check(CARRY, sgd, plans("gmoe", grow_schedule="4,4,6,6"))
