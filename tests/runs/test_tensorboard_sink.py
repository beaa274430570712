import importlib.util
import time

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.arrival_points import Point
from fairseq_alma.runs.live_log import LiveLog
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.tensorboard_sink import TensorBoardSink
from tests.runs.curves import Curves
from tests.runs.runs import RUN

POINTS = [Point(2, 1000.0, {"test/ppl": 40.0}), Point(3, 2000.0, {"test/ppl": 30.0, "stage/train_flops": 1e15})]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "R")
    run.write_run(RUN)
    return run


@pytest.fixture
def sink(run, tmp_path):
    return TensorBoardSink(run, LiveLog(tmp_path / "tb"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tb" / "R" / "arrivals"


def test_tensorboard_reads_the_points_over_arrivals(sink, folder):
    curves = Curves(folder)
    sink.require()
    sink.write(POINTS)
    assert curves.read("test/ppl") == [(2, 40.0, 1000.0), (3, 30.0, 2000.0)]
    assert curves.read("stage/train_flops") == [(3, pytest.approx(1e15), 2000.0)]


def test_points_are_added_to_what_an_open_tensorboard_has_read(sink, folder):
    curves = Curves(folder)
    sink.write(POINTS[:1])
    assert curves.steps("test/ppl") == [2]
    sink.write(POINTS)
    sink.write(POINTS)
    assert curves.steps("test/ppl") == [2, 3]
    assert len(list(folder.iterdir())) == 1


def test_a_launch_after_a_kill_shows_no_point_twice(run, sink, tmp_path, folder, monkeypatch):
    curves = Curves(folder)
    sink.write(POINTS[:1])
    assert curves.steps("test/ppl") == [2]
    sink.write(POINTS)
    (cut_off,) = folder.iterdir()
    cut_off.write_bytes(cut_off.read_bytes()[:-5])
    (run.root / ".arrivals").mkdir()
    (run.root / ".arrivals" / "events.out.tfevents.1.killed").touch()
    now = time.time()
    for launch in range(1, 4):
        # Files are named after the second that they begin in, and read in that order.
        monkeypatch.setattr("time.time", lambda launch=launch: now + launch)
        TensorBoardSink(run, LiveLog(tmp_path / "tb")).write(POINTS)
        assert curves.steps("test/ppl") == [2, 3]
        assert Curves(folder).steps("test/ppl") == [2, 3]
        assert len(list(folder.iterdir())) == 2
    assert not (run.root / ".arrivals").exists()


def test_a_stage_that_is_complete_later_than_those_after_it_takes_its_place(sink, folder):
    curves = Curves(folder)
    sink.write(POINTS[1:])
    assert curves.steps("test/ppl") == [3]
    sink.write(POINTS)
    assert curves.steps("test/ppl") == [2, 3]


def test_a_missing_package_is_one_line_that_says_what_to_install(sink, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AlmaError, match=r"--tensorboard-logdir .*tb: TensorBoard is not installed; pip install tensor"):
        sink.require()


def test_a_folder_that_cannot_be_made_is_one_line(sink, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tb").touch()
    with pytest.raises(AlmaError, match=r"--tensorboard-logdir .*tb: .*; give a folder to write to"):
        sink.require()
