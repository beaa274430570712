import shutil
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.live_log import LiveLog
from fairseq_alma.runs.run_folder import RunFolder

MODEL = ModelId(2, 1)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "runs" / "sm")
    run.write_run({})
    return run


def test_nothing_is_shown_unless_asked_for():
    assert LiveLog.from_options({"--lr": "1"}) == LiveLog(None, None)


def test_curves_are_asked_for_with_fairseqs_own_options():
    assert LiveLog.from_options({"--tensorboard-logdir": "tb", "--wandb-project": "p"}) == LiveLog(Path("tb"), "p")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--tensorboard-logdir": ""}, "--tensorboard-logdir after the --: a folder is needed"),
        ({"--wandb-project": ""}, "--wandb-project after the --: the name of a project is needed"),
        ({"--tensorboard": "tb"}, "--tensorboard after the --: write --tensorboard-logdir"),
    ],
)
def test_options_cut_short_or_without_a_value_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LiveLog.from_options(options)


def test_each_training_has_a_folder_of_its_own_under_the_runs_name(run):
    assert LiveLog(Path("tb")).curves(run, MODEL) == Path("tb/sm/stage-002/member-1")
    assert LiveLog(Path("tb")).folder(RunFolder(run.root / ".." / "sm")) == Path("tb/sm")


def test_two_runs_of_one_name_do_not_share_a_folder(run, tmp_path):
    live = LiveLog(tmp_path / "tb")
    live.claim_folder(run)
    live.claim_folder(run)
    other = RunFolder(tmp_path / "others" / "sm")
    with pytest.raises(AlmaError, match=r"tb: .*tb/sm shows another run, .*runs/sm; give another folder"):
        live.claim_folder(other)
    shutil.move(run.root, tmp_path / "moved")
    live.claim_folder(other)
    assert (tmp_path / "tb/sm/run.txt").read_text() == f"{other.root}\n"


def test_a_training_that_begins_anew_loses_its_old_curves_and_no_others(run, tmp_path):
    live = LiveLog(tmp_path / "tb", "p")
    old = live.curves(run, MODEL) / "train_inner" / "events.out.tfevents.1.host.1.0"
    other = live.curves(run, ModelId(2, 0)) / "train_inner" / "events.out.tfevents.1.host.1.0"
    for path in (old, other):
        path.parent.mkdir(parents=True)
        path.touch()
    before = live.wandb_identity(run, MODEL)
    live.rewind(run, MODEL, 0)
    assert not old.exists() and other.exists()
    assert live.wandb_identity(run, MODEL) != before


def test_a_training_that_goes_on_keeps_its_identity(run):
    live = LiveLog(None, "p")
    assert live.wandb_identity(run, MODEL) == live.wandb_identity(run, MODEL)
    assert live.wandb_identity(run, MODEL)["WANDB_RESUME"] == "allow"
    assert live.wandb_identity(run, MODEL) != live.wandb_identity(run, ModelId(2, 0))
    assert live.wandb_environment(run, MODEL) == {"WANDB_NAME": "sm/stage-002/member-1", "WANDB_RUN_GROUP": "sm"}


def test_without_weights_and_biases_nothing_is_named(run):
    assert LiveLog(Path("tb")).wandb_environment(run, MODEL) == {}
    assert LiveLog(Path("tb")).wandb_identity(run, MODEL) == {}
