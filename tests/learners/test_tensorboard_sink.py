import importlib.util

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.arrival_points import Point
from fairseq_alma.learners.live_log import LiveLog
from fairseq_alma.learners.run_folder import RunFolder
from fairseq_alma.learners.tensorboard_sink import TensorBoardSink

POINTS = [Point(2, 1000.0, {"test/ppl": 40.0}), Point(3, 2000.0, {"test/ppl": 30.0, "stage/train_flops": 1e15})]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "R")
    run.write_run({"learner": "sm"})
    return run


@pytest.fixture
def sink(run, tmp_path):
    return TensorBoardSink(run, LiveLog(tmp_path / "tb"))


def read(folder, tag):
    """Read a curve as TensorBoard does: step, value, wall time."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_points_over_arrivals(sink, tmp_path):
    pytest.importorskip("tensorboard")
    sink.require()
    sink.write(POINTS)
    folder = tmp_path / "tb" / "R" / "arrivals"
    assert read(folder, "test/ppl") == [(2, 40.0, 1000.0), (3, 30.0, 2000.0)]
    assert read(folder, "stage/train_flops") == [(3, pytest.approx(1e15), 2000.0)]


def test_points_that_are_written_again_are_there_once(sink, run, tmp_path):
    pytest.importorskip("tensorboard")
    (run.root / ".arrivals").mkdir()
    (run.root / ".arrivals" / "events.out.tfevents.1.killed").touch()
    sink.require()
    sink.write(POINTS[:1])
    sink.write(POINTS)
    folder = tmp_path / "tb" / "R" / "arrivals"
    assert len(list(folder.iterdir())) == 1
    assert [step for step, _, _ in read(folder, "test/ppl")] == [2, 3]
    assert not (run.root / ".arrivals").exists()


def test_a_missing_package_is_one_line_that_says_what_to_install(sink, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AlmaError, match=r"--tensorboard-logdir .*tb: TensorBoard is not installed; pip install tensor"):
        sink.require()


def test_a_folder_that_cannot_be_made_is_one_line(sink, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tb").touch()
    with pytest.raises(AlmaError, match=r"--tensorboard-logdir .*tb: .*; give a folder to write to"):
        sink.require()
