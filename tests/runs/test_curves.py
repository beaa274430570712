"""Curves have one point for each arrival."""

import sys

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.curves import ArrivalCurves, arrival_points
from fairseq_alma.runs.loop import RunDisplay
from fairseq_alma.runs.run_folder import RunFolder
from tests.runs.runs import complete, make_plans


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "R" / "seed-2")


def test_a_waiting_arrival_has_the_results_of_the_last_update_at_no_cost(run):
    plans = make_plans(2, wait=2)
    for plan, ppl in zip(plans, (20.0, 10.0), strict=True):
        complete(run, plan, ppl)
    figures = [(each["arrival"], each["test/ppl"], each["stage/num_updates"]) for each in arrival_points(run, plans)]
    assert figures == [(1, 20.0, 10.0), (2, 20.0, 0.0), (3, 10.0, 10.0)]


def test_tensorboard_has_each_arrival_once_after_a_second_launch(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plans, other = make_plans(3), RunFolder(tmp_path / "other" / tmp_path.name / "R" / "seed-2")
    for plan, folder in [*((plan, run) for plan in plans), (plans[0], other)]:
        complete(folder, plan, 30.0 - plan.stage.index)
        with RunDisplay(plans, "token", ArrivalCurves(folder, plans, {"--tensorboard-logdir": str(tmp_path / "tb")})):
            pass
    events = EventAccumulator(str(tmp_path / "tb" / tmp_path.name / "R" / "seed-2" / "arrivals"))
    events.Reload()
    found = sorted((each.step, each.value) for each in events.Scalars("test/ppl"))
    assert found == [(0, 30.0), (0, 30.0), (1, 29.0), (2, 28.0)]  # arrival 0 of both runs


def test_a_missing_package_is_reported_before_the_run(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AlmaError, match="--wandb-project p: requires the package wandb; run pip install wandb"):
        ArrivalCurves(run, make_plans(1), {"--wandb-project": "p"})


def test_a_failure_to_write_curves_does_not_end_the_run(run, tmp_path, capsys):
    (tmp_path / "tb").write_text("a file")
    plans = make_plans(1)
    complete(run, plans[0], 3.0)
    ArrivalCurves(run, plans, {"--tensorboard-logdir": str(tmp_path / "tb")}).catch_up()
    assert "note: cannot write curves of" in capsys.readouterr().err
