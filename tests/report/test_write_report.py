import hashlib
import itertools
import json
import os

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report import write_report
from fairseq_alma.report.figures import FigureFile
from tests.report.fakes import table_of, write_run


def test_a_new_stage_and_a_new_run_are_noticed_and_nothing_else(tmp_path, monkeypatch):
    first = write_run(tmp_path / "A", num_stages=1)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            write_run(tmp_path / "B", num_stages=0)
        if len(slept) == 5:
            (first / "stage-001").mkdir()
            (first / "stage-001" / "stage.json").write_text("{}")
        if len(slept) == 7:  # trained again, after the clock was set back
            os.utime(first / "stage-000" / "stage.json", (1e9, 1e9))

    monkeypatch.setattr(write_report.time, "sleep", sleep)
    noticed = [len(slept) for _ in itertools.islice(write_report.changes([first, tmp_path / "B"]), 4)]
    assert noticed == [0, 2, 5, 7]


@pytest.fixture(autouse=True)
def one_figure(monkeypatch):
    """Draw nothing that takes seconds."""
    monkeypatch.setattr(write_report, "draw_all", draw_one)


def report_of(out, *roots):
    write_report.Report(table_of(roots)).write(out)
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def test_a_report_removes_what_an_earlier_one_wrote_and_nothing_else(tmp_path):
    seeds = [write_run(tmp_path / f"S{seed}", seed=seed) for seed in (1, 2)]
    alone = write_run(tmp_path / "A", num_stages=1)
    fresh = report_of(tmp_path / "fresh", alone)
    out = tmp_path / "out"
    before = report_of(out, *seeds)
    stale = sorted(name for name in before - fresh if name.endswith(".tex"))
    assert stale and "figures/2.png" in before - fresh
    (out / stale[0]).write_text("edited by hand")
    for mine in ("own.tex", "figures/own.png"):
        (out / mine).write_text("mine")
    assert report_of(out, alone) == {*fresh, stale[0], "own.tex", "figures/own.png"}


def draw_one(runs, out, paper):
    out.mkdir(exist_ok=True)
    path = out / f"{len(runs.facts)}.png"
    path.write_bytes(b"png")
    return [FigureFile(path.stem, "A", "B", {"png": path})]


def test_nothing_is_written_where_the_page_cannot_be(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.html").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlmaError, match=r"index.html: a symbolic link"):
        report_of(tmp_path / "out", write_run(tmp_path / "A", num_stages=1))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.html"]


def test_a_list_of_files_removes_nothing_outside_its_folder_and_a_damaged_one_is_one_line(tmp_path):
    run, out = write_run(tmp_path / "A"), tmp_path / "out"
    for name in ("own.txt", "out/other/own.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    empty = hashlib.sha256().hexdigest()
    names = ("../own.txt", str(tmp_path / "own.txt"), "other/own.txt", "figures/../other/own.txt", "none.txt", "")
    (out / "alma-report.json").write_text(json.dumps({"files": dict.fromkeys(names, empty)}))
    report_of(out, run)
    assert (tmp_path / "own.txt").exists() and (out / "other/own.txt").exists()
    (out / "alma-report.json").write_text('{"files": 3}')
    with pytest.raises(AlmaError, match=r"alma-report.json: damaged, .*; remove it, and tables of an earlier report"):
        report_of(out, run)


def test_a_folder_of_a_version_without_the_list_keeps_what_it_has(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/regret.tex").touch()
    assert "regret.tex" in report_of(tmp_path / "out", write_run(tmp_path / "A", num_stages=1))
