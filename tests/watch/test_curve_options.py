from pathlib import Path

import pytest

from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.sinks import CurveOptions
from tests.runs.runs import RUN

MODEL = ModelId(2, 1)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "runs" / "sm")
    run.write_run(RUN)
    return run


def test_nothing_is_shown_unless_asked_for():
    assert CurveOptions.from_options({"--lr": "1"}) == CurveOptions(None, None)


def test_curves_are_asked_for_with_fairseqs_own_options():
    options = CurveOptions.from_options({"--tensorboard-logdir": "tb", "--wandb-project": "p"})
    assert options == CurveOptions(Path("tb"), "p")


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
        CurveOptions.from_options(options)


def test_each_training_has_a_folder_of_its_own_under_the_runs_name(run):
    assert CurveOptions(Path("tb")).curves(run, MODEL) == Path("tb/sm/stage-002/member-1")
    assert CurveOptions(Path("tb")).curves(RunFolder(run.root / ".." / "sm"), MODEL) == Path("tb/sm/stage-002/member-1")


def test_a_training_that_begins_anew_loses_its_old_curves_and_no_others(run, tmp_path):
    options = CurveOptions(tmp_path / "tb", "p")
    old = options.curves(run, MODEL) / "train_inner" / "events.out.tfevents.1.host.1.0"
    other = options.curves(run, ModelId(2, 0)) / "train_inner" / "events.out.tfevents.1.host.1.0"
    for path in (old, other):
        path.parent.mkdir(parents=True)
        path.touch()
    before = options.wandb_identity(run, MODEL)
    options.rewind(run, MODEL, 0)
    assert not old.exists() and other.exists()
    assert options.wandb_identity(run, MODEL) != before


def test_a_training_that_resumes_keeps_its_identity(run):
    options = CurveOptions(None, "p")
    assert options.wandb_identity(run, MODEL) == options.wandb_identity(run, MODEL)
    assert options.wandb_identity(run, MODEL)["WANDB_RESUME"] == "allow"
    assert options.wandb_identity(run, MODEL) != options.wandb_identity(run, ModelId(2, 0))
    assert options.wandb_environment(run, MODEL) == {"WANDB_NAME": "sm/stage-002/member-1", "WANDB_RUN_GROUP": "sm"}


def test_without_weights_and_biases_nothing_is_named(run):
    assert CurveOptions(Path("tb")).wandb_environment(run, MODEL) == {}
    assert CurveOptions(Path("tb")).wandb_identity(run, MODEL) == {}
