"""``alma-report``: tables, figures and the page; one line for each fault."""

import csv
import re
import sys

import pytest

from fairseq_alma.cli.report import main
from fairseq_alma.errors import AlmaError
from tests.report.fakes import image_stream, text_stream, write_run


@pytest.fixture
def no_figures(monkeypatch):
    """Draw no figures, which takes seconds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_complete_report_is_written_and_replaces_an_earlier_one(tmp_path, capsys, monkeypatch):
    figures = pytest.importorskip("fairseq_alma.report.figures")
    runs = [write_run(tmp_path / name, [ppl] * 4, seed=ppl) for name, ppl in (("A", 30), ("B", 31))]
    grows = write_run(tmp_path / "G", learner="gmoe", num_experts=(4, 6, 8, 12))
    out = tmp_path / "deep" / "report"
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="Format 'killed'"):
        patch.setattr(figures, "OMITTED_METADATA", {"png": "Software", "killed": ""})
        main([str(grows), "--out", str(out)])
    assert main([str(grows), "--out", str(out)]) == 0
    (out / "mine.csv").touch()
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert f"report: {out}/index.html" in capsys.readouterr().out
    tables = {f"{name}.{end}" for name in ("perplexity", "cost", "runs") for end in ("md", "csv", "tex")}
    assert {path.name for path in out.iterdir()} == {"index.html", "figures", "mine.csv", *tables}
    figures = {f"{name}.{end}" for name in ("curve", "trade-off") for end in ("png", "pdf")}
    assert {path.name for path in (out / "figures").iterdir()} == figures
    page = (out / "index.html").read_text()
    parts = ("data:image/png", "Test perplexity after each mega-batch</h3>", "alma-stream")
    assert sorted(parts, key=page.index) == [*parts]
    assert "http" not in re.sub(r"base64,[^\"]+", "", page)
    rows = csv.DictReader((out / "runs.csv").read_text().splitlines())
    assert [(row["run"], row["t3"]) for row in rows] == [(str(runs[0]), "30.0"), (str(runs[1]), "31.0")]


def test_damaged_runs_are_named_and_the_others_are_reported(tmp_path, capsys):
    good = write_run(tmp_path / "good", [30.0])
    damaged = write_run(tmp_path / "damaged", [30.0, 29.0], seed=2)
    (damaged / "stage-001" / "stage.json").write_text('{"stage": 1, "megabatches": [1]')
    record = write_run(tmp_path / "record", [30.0])
    (record / "run.json").write_text('{"learner": "sm"}')
    (tmp_path / "S1").mkdir()
    paths = (good, damaged, tmp_path / "S1", tmp_path / "nowhere", good / "run.json", record)
    assert main([*map(str, paths)]) == 1
    out, err = capsys.readouterr()
    assert out.count("| SM_w1") == 2  # in the table of results and in that of costs
    for error, said in zip(err.splitlines(), (
        "damaged/stage-001/stage.json: damaged: not JSON", "S1: expected a run folder, found a folder without",
        "nowhere: expected a run folder, found nothing",
        "run.json: expected a run folder, found", "record/run.json: damaged, Object missing required field seed",
    ), strict=True):  # fmt: skip
        assert said in error


def test_runs_on_different_streams_are_refused_unless_mixed(tmp_path, capsys):
    one, other = write_run(tmp_path / "A"), write_run(tmp_path / "B", stream=text_stream(4, "b" * 64))
    images = write_run(tmp_path / "I", stream=image_stream(4))
    assert main([str(one), str(images), str(other)]) == 1
    of_images, of_text = capsys.readouterr().err.splitlines()
    assert re.search(r"B: expected the stream of .*A .*--mix", of_text) and "--mix" not in of_images
    twin, worse = write_run(tmp_path / "C"), write_run(tmp_path / "D", [90.0] * 4, "ens", text_stream(4, "b" * 64))
    assert main([str(one), "--mix", str(other), str(twin), str(worse)]) == 0
    out, err = capsys.readouterr()  # test sets differ, so only bits per byte are compared
    assert "C: left out, as another run has the same options and seed" in err
    assert "bits per byte" in out and "Best over" not in out and "test perplexity 2" not in out
    assert main([str(one), str(images), "--mix"]) == 1


def test_without_matplotlib_only_the_figures_are_missing(tmp_path, monkeypatch, capsys, no_figures):
    monkeypatch.delitem(sys.modules, "fairseq_alma.report.figures", raising=False)
    assert main([str(write_run(tmp_path / "R")), "--out", str(tmp_path / "out")]) == 0
    assert "pip install 'fairseq-alma[report]'" in capsys.readouterr().err
    assert (tmp_path / "out" / "index.html").is_file()


def test_names_of_runs_print_no_control_characters(tmp_path, monkeypatch, capsys, no_figures):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a\x1b[31m\nb", stream={**text_stream(), "path": "s\x1b[2J"})
    assert main(["a\x1b[31m\nb", "--out", "out\x07"]) == 0
    texts = [*capsys.readouterr(), *(path.read_text() for path in (tmp_path / "out\x07").glob("*.*"))]
    assert len(texts) > 5 and not any(mark in text for mark in "\x1b\x07" for text in texts)


def test_nothing_is_written_without_a_run_or_to_an_invalid_path(tmp_path, no_figures):
    run, damaged = write_run(tmp_path / "A"), write_run(tmp_path / "B")
    (damaged / "run.json").write_text('{"learner": "sm"}')
    assert main([str(damaged), "--out", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "index.html").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlmaError, match=r"index\.html: expected a regular file or a new path, found a symbolic link"):
        main([str(run), "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["figures", "index.html"]
    (tmp_path / "out" / "index.html").unlink()
    for name in ("perplexity.csv", "growth.tex", "figures/curve.pdf", "index.html"):
        (tmp_path / "out" / name).write_text("my own")
        with pytest.raises(AlmaError, match=f"--out .*out: expected a report, found another {name}"):
            main([str(run), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "perplexity.csv").read_text() == "my own"
    with pytest.raises(AlmaError, match=r"--out .*run\.json: expected a folder, found a file"):
        main([str(run), "--out", str(run / "run.json")])
