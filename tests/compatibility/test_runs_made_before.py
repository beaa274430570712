"""Runs of the version before are gone on with, recognised, reported, tested and repeated, with the figures of then.

Commands of text take seconds each to start: by default one stage of two of its runs is gone on with. All of them, from
every state and from the beginning: ``ALMA_COMPATIBILITY=all python -m pytest tests/compatibility``, many minutes.
"""

import json
import os
import re
import subprocess

import pytest
import torch

from fairseq_alma.cli.report import main as alma_report
from fairseq_alma.cli.stream import main as alma_stream
from tests.compatibility.archives import (
    ENVIRONMENT,
    KINDS,
    machine,
    read_commands,
    stage_records,
    stream_of,
    take_over,
    unpack,
    weight_sums,
)

MADE = read_commands()
EVERY_RUN = [(kind, name) for kind in KINDS for name in MADE["kinds"][kind]["runs"]]
IMAGE_RUNS, TEXT_RUNS = ([name for kind, name in EVERY_RUN if kind == each] for each in ("images", "text"))
BEGUN = ["begun", "killed"]
# fairseq-eval-lm prints losses with four decimals.
TOLERANCE = {"text": 1e-4, "images": 1e-5}
exhaustive = pytest.mark.skipif(
    os.environ.get("ALMA_COMPATIBILITY") != "all", reason="takes many minutes; set ALMA_COMPATIBILITY=all"
)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return {kind: unpack(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def command_of(kind, name, *options):
    command = MADE["kinds"][kind]["runs"][name]["command"]
    end = command.index("--")
    return [*command[:end], *options, *command[end:]]


def run_images(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert alma_stream(command_of("images", name)[1:]) == 0


def run_text(name, folder, *options):
    command = command_of("text", name, *options)
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def leaves(value, path=""):
    """Yield path and value of everything in nested records that is no record itself."""
    if isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}/{name}")
    else:
        yield path, value


def require_figures_of_then(archives, kind, name, run, stages=slice(None)):
    """Check the figures of stages, and once all are complete the weights, against the run that was finished then."""
    before = stage_records(archives[kind] / "finished" / name)
    found = stage_records(run)
    same_machine = machine() == MADE["machine"]
    assert len(found) == len(before[stages])
    for stage, want in zip(found, before[stages], strict=True):
        now = dict(leaves(stage))
        for path, value in leaves(want):
            close = isinstance(value, float) and not same_machine
            assert now[path] == (pytest.approx(value, rel=TOLERANCE[kind]) if close else value), path
    if same_machine and len(found) == len(before):
        assert weight_sums(run) == MADE["kinds"][kind]["runs"][name]["weights"]


def is_unfinished(run):
    """Tell whether a run has an unfinished training in stage 1."""
    return bool([*run.glob("stage-001/member-*/training.pt"), *run.glob("stage-001/member-*/checkpoint_*_*.pt")])


@pytest.mark.parametrize(("kind", "name"), EVERY_RUN)
def test_the_archives_have_what_they_promise(kind, name, archives):
    finished, begun, killed = (archives[kind] / state / name for state in ("finished", "begun", "killed"))
    assert len(stage_records(begun)) == len(stage_records(killed)) == 1 < len(stage_records(finished))
    assert is_unfinished(killed) and not is_unfinished(begun) and not is_unfinished(finished)
    assert weight_sums(finished) == MADE["kinds"][kind]["runs"][name]["weights"]


@pytest.mark.parametrize("state", BEGUN)
@pytest.mark.parametrize("name", IMAGE_RUNS)
def test_a_begun_run_on_images_ends_with_the_figures_of_then(name, state, archives, tmp_path, monkeypatch, one_thread):
    run = take_over(archives["images"], "images", state, name, tmp_path)
    run_images(name, tmp_path, monkeypatch)
    require_figures_of_then(archives, "images", name, run)


@pytest.mark.parametrize("name", IMAGE_RUNS)
def test_a_run_on_images_gives_the_figures_of_then(name, archives, tmp_path, monkeypatch, one_thread):
    (tmp_path / stream_of("images")).symlink_to(archives["images"] / stream_of("images"))
    run_images(name, tmp_path, monkeypatch)
    require_figures_of_then(archives, "images", name, tmp_path / "runs" / name)


@pytest.mark.parametrize("name", ["gmoe-split", "ens"])
def test_the_stage_in_which_a_run_on_text_was_killed_ends_with_the_figures_of_then(name, archives, tmp_path):
    run = take_over(archives["text"], "text", "killed", name, tmp_path)
    run_text(name, tmp_path, "--stage", "1")
    logs = "".join(path.read_text() for path in run.glob("stage-001/train-member-*.log"))
    assert "(epoch 1 @ 4 updates)" in logs  # where it had been killed, not at the beginning
    require_figures_of_then(archives, "text", name, run, slice(2))


@exhaustive
@pytest.mark.parametrize("state", BEGUN)
@pytest.mark.parametrize("name", TEXT_RUNS)
def test_a_begun_run_on_text_ends_with_the_figures_of_then(name, state, archives, tmp_path):
    run = take_over(archives["text"], "text", state, name, tmp_path)
    run_text(name, tmp_path)
    require_figures_of_then(archives, "text", name, run)


@exhaustive
@pytest.mark.parametrize("name", TEXT_RUNS)
def test_a_run_on_text_gives_the_figures_of_then(name, archives, tmp_path):
    (tmp_path / stream_of("text")).symlink_to(archives["text"] / stream_of("text"))
    run_text(name, tmp_path)
    require_figures_of_then(archives, "text", name, tmp_path / "runs" / name)


@pytest.mark.parametrize(("kind", "name"), EVERY_RUN)
def test_a_finished_run_is_left_as_it_is(kind, name, archives, tmp_path, monkeypatch, capsys):
    run = take_over(archives[kind], kind, "finished", name, tmp_path)
    before = contents_of(run)
    monkeypatch.chdir(tmp_path)
    assert alma_stream(command_of(kind, name)[1:]) == 0
    assert f"runs/{name}: nothing to do" in capsys.readouterr().out
    assert contents_of(run) == before


def contents_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".lock" not in path.name}


@pytest.mark.parametrize("state", ["finished", "killed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_has_the_figures_of_then(kind, state, archives, capsys):
    runs = archives[kind] / state
    assert alma_report([str(run) for run in sorted(runs.iterdir())]) == 0
    rows = first_table(capsys.readouterr().out)
    assert rows.keys() == set(MADE["kinds"][kind]["runs"])
    for name, row in rows.items():
        records = stage_records(runs / name)
        for record in records:
            test = record["test"]
            cell = row[f"t{record['megabatches'][-1]}"]
            assert cell == f"{test['ppl'] if kind == 'text' else 100 * test['error']:.2f}"
        assert row["train FLOPs"] == f"{sum(record['train_flops'] for record in records):.2e}"
        assert ("–" in row.values()) == (state == "killed")


def first_table(out):
    """Return the cells of the first printed table, by the name of the run."""
    lines = out.split("\n\n")[0].replace("**", "").splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[-1].rsplit("/", 1)[-1]: dict(zip(header, row, strict=True)) for row in rows}


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_is_written_in_full(kind, archives, tmp_path):
    runs = [str(run) for state in ("finished", "killed") for run in sorted((archives[kind] / state).iterdir())]
    assert alma_report([*runs, "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / ("perplexity.csv" if kind == "text" else "error.csv")).read_text()
    assert len(table.splitlines()) == 1 + len(runs)
    assert list((tmp_path / "out/figures").glob("*.png"))


@exhaustive
@pytest.mark.parametrize("name", TEXT_RUNS)
def test_a_checkpoint_of_then_has_the_test_loss_of_then(name, archives):
    """Of a finished run, by the stock command."""
    stage = sorted((archives["text"] / "finished" / name).glob("stage-*"))[-1]
    checkpoint = next(path for path in (stage / "ensemble.pt", stage / "member-0/checkpoint_last.pt") if path.exists())
    command = ["fairseq-eval-lm", str(archives["text"] / stream_of("text")), "--user-dir", "fairseq_alma", "--cpu"]
    command += ["--task", "alma_lm", "--path", str(checkpoint), "--gen-subset", "test", "--tokens-per-sample", "16"]
    command += ["--batch-size", "4"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    loss = float(re.search(r"Loss \(base 2\): (\S+),", done.stdout + done.stderr)[1])
    assert loss == pytest.approx(json.loads((stage / "stage.json").read_text())["test"]["loss"], abs=2e-4)
