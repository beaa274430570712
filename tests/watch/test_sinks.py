import importlib.util
import json
import shutil
import sys
import time
import types
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.sinks import EVENTS, ArrivalPoint, CurveOptions, TensorBoardSink, WandbSink, rewind_curves
from tests.runs.runs import RUN
from tests.watch.curves import Curves

MODEL = ModelId(2, 1)
POINTS = [
    ArrivalPoint(2, 1000.0, {"test/ppl": 40.0}),
    ArrivalPoint(3, 2000.0, {"test/ppl": 30.0, "stage/train_flops": 1e15}),
]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "runs" / "sm")
    run.write_run(RUN)
    return run


def test_curves_are_asked_for_with_fairseqs_own_options_and_not_shown_unless_they_are():
    assert CurveOptions.from_options({"--lr": "1"}) == CurveOptions(None, None)
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
    assert CurveOptions(Path("tb")).wandb_environment(run, MODEL) == {} == CurveOptions().wandb_identity(run, MODEL)


@pytest.fixture
def sink(run, tmp_path):
    return TensorBoardSink(run, tmp_path / "tb")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tb" / "sm" / "arrivals"


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
    other = RunFolder(tmp_path / "others" / "sm")
    with pytest.raises(AlmaError, match=r"tb: .*tb/sm shows another run, .*/sm; give another folder"):
        TensorBoardSink(other, tmp_path / "tb").require()
    shutil.move(run.root, tmp_path / "moved")
    TensorBoardSink(other, tmp_path / "tb").require()
    assert (tmp_path / "tb/sm/run.txt").read_text() == f"{other.root}\n"


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
    rewind_curves(tmp_path / "nowhere", num_updates=6)  # a training without curves
    rewind_curves(tmp_path, num_updates=0)
    assert not list(tmp_path.rglob(EVENTS)) and not (tmp_path / "nowhere").exists()


class FakeRun:
    """Stands for a run on the server: it knows the steps that it has."""

    def __init__(self, history, folder):
        self.history, self.dir = history, str(folder / "files")
        self.step = max(history, default=-1) + 1

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, figures, step):
        assert step not in self.history
        self.history[step] = figures

    def finish(self):
        pass


class FakeWandb(types.ModuleType):
    """What the sink uses of the package."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self, folder):
        super().__init__("wandb")
        self.folder, self.history = folder, {}
        self.options = []
        self.refusal = None
        self.num_teardowns = 0

    def Settings(self, **options):
        return options

    def init(self, **options):
        if self.refusal:
            raise self.errors.Error(self.refusal)
        self.options.append(options)
        return FakeRun(self.history, self.folder)

    def teardown(self):
        self.num_teardowns += 1


@pytest.fixture
def server(monkeypatch, tmp_path):
    fake = FakeWandb(tmp_path / "wandb" / "run-1")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_points_are_steps_of_one_run_over_all_launches(run, server):
    WandbSink(run, "p").write(POINTS[:1])
    WandbSink(run, "p").write(POINTS)
    assert server.history == {2: {"test/ppl": 40.0, "arrival": 2}, 3: {**POINTS[1].figures, "arrival": 3}}
    first, second = server.options
    assert first["id"] == second["id"] == json.loads((run.root / "wandb.json").read_text())["id"]
    assert (first["project"], first["name"], first["resume"]) == ("p", "sm", "allow")
    assert first["config"] == RUN
    assert server.num_teardowns == 2  # no service is left behind for the processes that follow


def test_a_refusal_is_one_line_that_says_what_to_do(run, server):
    server.refusal = "No API key configured.\nUse `wandb login`"
    with pytest.raises(AlmaError, match=r"--wandb-project p: .*No API key configured. Use `wandb login`.*offline$"):
        WandbSink(run, "p").write(POINTS)
    assert server.num_teardowns == 1


def test_a_missing_package_or_a_folder_of_its_name_is_one_line(run, monkeypatch):
    for found in (None, types.SimpleNamespace(origin=None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(AlmaError, match=r"--wandb-project p: Weights & Biases is not installed; pip install wandb"):
            WandbSink(run, "p").require()


def test_offline_each_launch_writes_all_points_and_removes_those_before(run, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sink = WandbSink(run, "p")
    sink.require()
    sink.write(POINTS[:1])
    other = tmp_path / "wandb" / "offline-run-20260101_000000-another"
    other.mkdir()
    sink.write(POINTS)
    identity = json.loads((run.root / "wandb.json").read_text())["id"]
    (mine,) = (tmp_path / "wandb").glob(f"offline-run-*-{identity}*")
    assert (mine / f"run-{identity}.wandb").stat().st_size > 0
    assert other.is_dir()
