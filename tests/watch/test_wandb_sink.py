import importlib.util
import json
import sys
import types

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.arrival_curves import ArrivalPoint
from fairseq_alma.watch.sinks import WandbSink
from tests.runs.runs import RUN

POINTS = [ArrivalPoint(2, 1000.0, {"test/ppl": 40.0}), ArrivalPoint(3, 2000.0, {"test/ppl": 30.0})]


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
def run(tmp_path):
    run = RunFolder(tmp_path / "sm")
    run.write_run(RUN)
    return run


@pytest.fixture
def server(monkeypatch, tmp_path):
    fake = FakeWandb(tmp_path / "wandb" / "run-1")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_points_are_steps_of_one_run_over_all_launches(run, server):
    WandbSink(run, "p").write(POINTS[:1])
    WandbSink(run, "p").write(POINTS)
    assert server.history == {2: {"test/ppl": 40.0, "arrival": 2}, 3: {"test/ppl": 30.0, "arrival": 3}}
    first, second = server.options
    assert first["id"] == second["id"] == json.loads((run.root / "wandb.json").read_text())["id"]
    assert (first["project"], first["name"], first["resume"]) == ("p", "sm", "allow")
    assert first["config"] == RUN


def test_no_service_is_left_behind_for_the_processes_that_follow(run, server):
    WandbSink(run, "p").write([])
    assert server.num_teardowns == 1


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
