import csv
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from fairseq_alma.cli.report import main
from fairseq_alma.errors import AlmaError
from tests.report.fakes import image_stream, text_stream, write_run
from tests.scripts import usage_error

GROWS = {"num_experts": (4, 6)}


@pytest.fixture
def no_figures(monkeypatch):
    """Spare a test the seconds that drawing takes."""
    monkeypatch.setattr("fairseq_alma.report.write_report.draw_all", lambda *_: [])


def rows(out):
    """The cells of the first printed table, by the run's name."""
    first = next(part for part in out.split("\n\n") if part.startswith("|")).replace("**", "")
    header, _, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    return {row[-1].rsplit("/", 1)[-1]: dict(zip(header, row, strict=True)) for row in found}


def test_runs_stand_before_and_after_options(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
    main([runs[0], "--paper", runs[1]])
    assert list(rows(capsys.readouterr().out)) == ["a", "b"]


def test_the_table_has_a_row_for_each_run_with_size_and_cost(tmp_path, capsys):
    run = write_run(tmp_path / "R", [28.57, 27.45, 26.91, 26.53], num_params=(65_000_000,), train_flops=1e15)
    assert main([str(run)]) == 0
    row = rows(capsys.readouterr().out)["R"]
    assert (row["learner"], row["experts"], row["params"], row["train FLOPs"]) == ("SM_w1", "4", "65M", "4.00e+15")
    assert row["bits per byte"] == f"{math.log2(26.53) / 4:.3f}"  # 100 tokens of 400 bytes


@pytest.mark.parametrize(
    ("values", "options", "shown", "average", "final"),
    [
        ([30.0, 28.0, 26.0, 24.0], {}, ["30.00", "28.00", "26.00", "24.00"], "27.00", "24.00"),
        ([24.0], {"wait": 4}, ["*", "*", "*", "24.00"], "43.50", "24.00"),  # (3 * 50 + 24) / 4, of 50 units
        ([25.0], {"wait": 3, "drop_rest": True}, ["*", "*", "25.00", "*"], "37.50", "25.00"),
        ([30.0], {}, ["30.00", "–", "–", "–"], "–", "30.00"),
        ([], {}, ["–"] * 4, "–", "–"),
        ([24.3], {"iid": 3}, ["*", "*", "24.30", "*"], "–", "24.30"),
    ],
    ids=["complete", "waits", "drops the rest", "under way", "not begun", "iid"],
)
def test_a_row_has_each_arrival_their_mean_and_the_last_value(values, options, shown, average, final, tmp_path, capsys):
    """While a learner waits it counts as an untrained model; a value of an update that is not made yet is a dash."""
    main([str(write_run(tmp_path / "R", values, **options))])
    row = rows(capsys.readouterr().out)["R"]
    assert [row[f"t{t}"] for t in range(4)] == shown
    assert (row["avg PPL"], row["final PPL"]) == (average, final)


def test_tables_are_written_for_people_and_for_programs(tmp_path, no_figures):
    run = write_run(tmp_path / "R", [24.123456], wait=4, num_params=(65_000_000,))
    main([str(run), "--out", str(tmp_path / "out")])
    assert "| SM_w4" in (tmp_path / "out" / "perplexity.md").read_text()
    with open(tmp_path / "out" / "perplexity.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["t0"], row["t3"], row["params"]) == ("", "24.123456", "65000000")


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(tmp_path, capsys):
    good = write_run(tmp_path / "good", [30.0])
    damaged = write_run(tmp_path / "damaged", [30.0, 29.0])
    (damaged / "stage-001" / "stage.json").write_text('{"stage": 1, "megabatches": [1]')
    incomplete = write_run(tmp_path / "incomplete", [30.0])
    (incomplete / "stage-000" / "stage.json").write_text('{"stage": 0, "megabatches": [0], "test": {"loss": 1}}')
    record = write_run(tmp_path / "record", [30.0])
    (record / "run.json").write_text('{"learner": "sm"}')
    no_run, file = tmp_path / "S1", good / "run.json"
    no_run.mkdir()
    assert main([*map(str, (good, damaged, incomplete, no_run, tmp_path / "nowhere", file, record))]) == 1
    captured = capsys.readouterr()
    table = rows(captured.out)
    assert set(table) == {"good", "damaged", "incomplete"}
    assert [table["damaged"][f"t{t}"] for t in range(4)] == ["30.00", "–", "–", "–"]
    assert table["incomplete"]["t0"] == "–"
    errors = captured.err.splitlines()
    assert len(errors) == 6
    assert "damaged/stage-001/stage.json: damaged, not JSON" in errors[0]
    assert "incomplete/stage-000/stage.json: damaged, no num_params, num_experts" in errors[1]
    assert "S1: no run.json in it" in errors[2]
    assert "nowhere: no such folder, so this is no run" in errors[3]
    assert "good/run.json: a file, so this is no run" in errors[4]
    assert "record/run.json: damaged, no seed, options, train_options, stream in it; leave this folder" in errors[5]


@pytest.mark.parametrize("stream", [image_stream(4), text_stream()], ids=["images", "text"])
def test_an_option_for_the_papers_numbers_that_does_nothing_says_so(stream, tmp_path, capsys):
    run = write_run(tmp_path / "R", learner="ens", stream=stream, wait=2)
    assert main([str(run), "--paper"]) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("--paper: ignored for the tables")


def test_runs_on_different_streams_are_refused_unless_mixed(tmp_path, capsys):
    one, other = write_run(tmp_path / "A"), write_run(tmp_path / "B", stream=text_stream(2, "b" * 64))
    assert main([str(one), str(other)]) == 1
    captured = capsys.readouterr()
    assert set(rows(captured.out)) == {"A"}
    assert re.search(r"B: its stream .* is not that of .*A .*--mix", captured.err)
    assert main([str(one), str(other), "--mix"]) == 0
    assert set(rows(capsys.readouterr().out)) == {"A", "B"}


def test_a_run_whose_stream_grew_has_the_new_arrivals(tmp_path, capsys):
    run = write_run(tmp_path / "R", [30.0, 29.0, 28.0])
    record = json.loads((run / "run.json").read_text())
    record["stream"]["num_megabatches"] = 2
    (run / "run.json").write_text(json.dumps(record))
    main([str(run)])
    assert rows(capsys.readouterr().out)["R"]["t2"] == "28.00"


@pytest.mark.parametrize(
    "learner,options,label,experts",
    [
        ("ens", {"num_members": (2,)}, "Ens_w1", "4@2"),
        ("ens", {"num_members": (2,), "iid": 2}, "Ens iid k2", "4@2"),
        ("gens", {"num_members": (1, 2)}, "gEns_w1", "4@1, 4@2"),
        ("gens", {"num_members": (1, 2), "init": "previous"}, "gEns_w1 previous", "4@1, 4@2"),
        ("gmoe", {**GROWS, "grow_method": "copy", "grow_select": "loss"}, "gMoE_w1", "4, 6"),
        (
            "gmoe",
            {**GROWS, "grow_method": "split", "grow_select": "usage"},
            "gMoE_w1 split usage",
            "4, 6",
        ),
        ("umix", {"num_members": (2,), "replay": True}, "UMix_w1 replay", "4@2"),
    ],
)
def test_learners_are_named_as_in_the_papers_tables(learner, options, label, experts, tmp_path, capsys):
    main([str(write_run(tmp_path / "R", [30.0, 29.0], learner, text_stream(2), **options))])
    row = rows(capsys.readouterr().out)["R"]
    assert (row["learner"], row["experts"]) == (label, experts)


def test_runs_that_differ_by_their_seeds_alone_are_averaged(tmp_path, capsys, no_figures):
    runs = [
        write_run(tmp_path / f"R{seed}", [30.0 + seed, 20.0 + 2 * seed], stream=text_stream(2), seed=seed)
        for seed in (1, 2, 3)
    ]
    other = write_run(tmp_path / "other", [99.0, 99.0], stream=text_stream(2), init="scratch")
    under_way = write_run(tmp_path / "under-way", [50.0], stream=text_stream(2), seed=4)
    main([*map(str, [*runs, other, under_way]), "--out", str(tmp_path / "out")])
    assert "| SM_w1   |       4 |     1k |     3 | 32.00 ± 1.00 | 24.00 ± 2.00 |" in capsys.readouterr().out
    with open(tmp_path / "out" / "seeds.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["seeds"], row["t1 mean"], row["t1 deviation"]) == ("3", "24.0", "2.0")


def test_the_jump_at_growth_is_shown(tmp_path, capsys, no_figures):
    run = write_run(tmp_path / "R", [40.0, 20.0, 18.0], "gmoe", text_stream(3), **GROWS)
    main([str(run), "--out", str(tmp_path / "out")])
    with open(tmp_path / "out" / "growth.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["at"], row["experts"]) == ("t1", "4 to 6")
    assert (row["before"], row["after growth"], row["after training"]) == ("42.0", "25.0", "21.0")
    assert "25.00" in capsys.readouterr().out


def test_the_whole_report_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name, [ppl] * 4) for name, ppl in (("A", 30.0), ("B", 31.0))]
    out = tmp_path / "deep" / "report"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"index.html", "findings.md", "figures", "perplexity.md", "perplexity.csv", "perplexity.tex"} <= names
    assert not [name for name in names if name.startswith(".")]
    assert {path.suffix for path in (out / "figures").iterdir()} >= {".png", ".pdf"}
    assert "data:image/" in (out / "index.html").read_text()
    assert f"written: {out}/index.html" in capsys.readouterr().out


def test_without_matplotlib_everything_but_the_figures_is_written(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "fairseq_alma.report.figures."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "R")
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert "matplotlib" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"index.html", "perplexity.csv", "summary.tex"}


def test_a_run_that_is_given_twice_counts_once(tmp_path, capsys):
    run = write_run(tmp_path / "R")
    main([str(run), str(run.parent / "." / "R"), f"{run}/"])
    assert capsys.readouterr().out.split("\n\n")[1].count("SM_w1") == 1


def test_names_of_runs_act_neither_on_a_terminal_nor_on_a_spreadsheet(tmp_path, monkeypatch, capsys, no_figures):
    monkeypatch.chdir(tmp_path)
    for name in ("=1+1", "a\x1b[31m\nb", os.fsdecode(b"bad\xff")):
        write_run(Path(name), [30.0, 20.0, 10.0, 9.0], stream={**text_stream(), "path": "s\x1b[2J"})
    damaged = write_run(Path("d\x1b[0m"), [30.0])
    (damaged / "stage-000" / "stage.json").write_text("{")
    assert main([*map(str, sorted(Path().glob("*"))), "--out", "out\x07"]) == 1
    captured = capsys.readouterr()
    texts = [captured.out, captured.err, *(path.read_text() for path in Path("out\x07").glob("*.*"))]
    assert len(texts) > 5 and not any(mark in text for mark in "\x1b\x07" for text in texts)
    assert "a\\x1b[31m\\nb" in captured.out and "d\\x1b[0m" in captured.err
    with open("out\x07/perplexity.csv") as file:
        assert {row["run"] for row in csv.DictReader(file)} >= {"'=1+1", "a\\x1b[31m\\nb", "bad\\udcff"}


def test_a_damaged_run_leaves_no_half_report(tmp_path, capsys, no_figures):
    good, damaged = write_run(tmp_path / "A"), write_run(tmp_path / "B", seed=2)
    record = json.loads((damaged / "run.json").read_text())
    (damaged / "run.json").write_text(json.dumps({**record, "train_options": [1]}))
    assert main([str(good), str(damaged), "--out", str(tmp_path / "out")]) == 1
    assert "B/run.json: damaged" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"index.html", "findings.md", *(f"perplexity.{ending}" for ending in ("md", "csv", "tex"))}
    assert main([str(damaged), "--out", str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()


def test_watching_ends_when_all_runs_are_complete(tmp_path, capsys, monkeypatch, no_figures):
    first = write_run(tmp_path / "A", [30.0], stream=text_stream(2))
    late = tmp_path / "B"

    def work(seconds):
        if not late.exists():
            write_run(late, stream=text_stream(2), seed=2)
        else:
            shutil.copytree(late / "stage-001", first / "stage-001")

    monkeypatch.setattr("fairseq_alma.report.write_report.time.sleep", work)
    assert main([str(first), str(late), "--out", str(tmp_path / "out"), "--watch"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"written: {tmp_path}/out/index.html, {stages} of {planned} stages"
        for stages, planned in ((1, 2), (3, 4), (4, 4))
    ]
    assert captured.err.count("no such folder") == 1
    assert "refresh" not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize("arguments,message", [(["R", "--watch"], "--watch: needs --out DIR"), ([], "RUN")])
def test_a_wrong_use_is_a_usage_error(arguments, message, capsys):
    assert message in usage_error(capsys, main, arguments)


def test_an_output_that_is_a_file_is_refused(tmp_path):
    run = write_run(tmp_path / "R")
    with pytest.raises(AlmaError, match=r"--out .*run\.json: a file; give the name of a folder"):
        main([str(run), "--out", str(run / "run.json")])


def test_orders_of_the_same_images_are_one_stream(tmp_path, capsys):
    runs = [write_run(tmp_path / f"R{seed}", stream=image_stream(seed=seed)) for seed in (1, 2)]
    assert main([*map(str, runs)]) == 0
    assert re.search(r"SM_w1 +\| +4 \| +1k \| +2 \|", capsys.readouterr().out)
    other = write_run(tmp_path / "other", stream=image_stream(dataset="mnist"))
    assert main([*map(str, runs), str(other)]) == 1
    assert "other: its stream" in capsys.readouterr().err
