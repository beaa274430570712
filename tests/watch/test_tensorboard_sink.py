import importlib.util
import shutil
import time

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.arrival_curves import ArrivalPoint
from fairseq_alma.watch.sinks import EVENTS, TensorBoardSink, rewind_curves
from tests.runs.runs import RUN
from tests.watch.curves import Curves

POINTS = [
    ArrivalPoint(2, 1000.0, {"test/ppl": 40.0}),
    ArrivalPoint(3, 2000.0, {"test/ppl": 30.0, "stage/train_flops": 1e15}),
]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "R")
    run.write_run(RUN)
    return run


@pytest.fixture
def sink(run, tmp_path):
    return TensorBoardSink(run, tmp_path / "tb")


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
        TensorBoardSink(run, tmp_path / "tb").write(POINTS)
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


def test_two_runs_of_one_name_do_not_share_a_folder(run, sink, tmp_path):
    pytest.importorskip("tensorboard")
    sink.require()
    sink.require()
    other = RunFolder(tmp_path / "others" / "R")
    with pytest.raises(AlmaError, match=r"tb: .*tb/R shows another run, .*/R; give another folder"):
        TensorBoardSink(other, tmp_path / "tb").require()
    shutil.move(run.root, tmp_path / "moved")
    TensorBoardSink(other, tmp_path / "tb").require()
    assert (tmp_path / "tb/R/run.txt").read_text() == f"{other.root}\n"


def write(folder, number, steps):
    """Write a curve as fairseq does, into the event file of this number: the order in which TensorBoard reads."""
    before = set(folder.glob(EVENTS))
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(folder))
    for step in steps:
        writer.add_scalar("loss", 100 * number + step, step)
    writer.close()
    name_new_files(folder, before, number)


def name_new_files(folder, before, number):
    for i, new in enumerate(sorted(set(folder.glob(EVENTS)) - before)):
        new.rename(folder / f"events.out.tfevents.{number + i:010d}.test")


def test_a_training_that_resumes_draws_no_update_twice(tmp_path):
    folder = tmp_path / "train_inner"
    write(folder, 1, range(1, 9))
    curves = Curves(folder)
    assert len(curves.steps("loss")) == 8
    before = set(folder.glob(EVENTS))
    rewind_curves(tmp_path, num_updates=6)
    name_new_files(folder, before, 2)
    write(folder, 9, range(7, 10))
    expected = [101, 102, 103, 104, 105, 106, 907, 908, 909]
    assert [value for _, value, _ in curves.read("loss")] == expected
    assert [value for _, value, _ in Curves(folder).read("loss")] == expected


def test_a_training_that_begins_anew_loses_its_old_curves(tmp_path):
    write(tmp_path / "train_inner", 1, range(3))
    rewind_curves(tmp_path, num_updates=0)
    assert not list(tmp_path.rglob(EVENTS))


def test_a_training_without_curves_is_left_alone(tmp_path):
    rewind_curves(tmp_path / "nowhere", num_updates=6)
    assert not list(tmp_path.iterdir())
