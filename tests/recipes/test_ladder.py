"""The ladder of sizes: what is trained in which order, what is not trained again, and what is refused."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from tests.recipes.programs import load
from tests.report.fakes import text_stream, write_run

ladder, tables = load("ladder"), load("tables")
SIZE = ladder.Size(16)
RATES = ("0.1", "0.2")


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    return tmp_path


def runs_of(folder, ended):
    """Write the runs of rows with a rate and a seed, by the perplexity after the last of two mega-batches."""
    return [
        write_run(folder / f"{row}-lr{rate}-seed{seed}", [30.0, value], stream=text_stream(2), seed=seed)
        for (row, rate, seed), value in ended.items()
    ]


def names(trainings):
    return [training.name for training in trainings]


def test_all_rows_are_trained_with_the_rate_of_the_first_before_others_are_tried():
    first = ["sm-4-lr0.1-seed1", "sm-4-lr0.2-seed1"]
    assert names(ladder.wanted(["sm-12", "ens-2"], {}, RATES, (1, 2))) == [
        *first, "sm-12-lr0.1-seed1", "sm-12-lr0.2-seed1",
    ]  # fmt: skip
    known = {"sm-4": "0.2", "ens-2": "0.2"}  # an ensemble is trained as its members are
    assert names(ladder.wanted(["sm-12", "ens-2"], known, RATES, (1, 2))) == [
        *first, "sm-12-lr0.2-seed1", "ens-2-lr0.2-seed1", "sm-12-lr0.1-seed1", "ens-2-lr0.2-seed2",
    ]  # fmt: skip
    own = {"sm-4": "0.2", "sm-4-iid4": "0.1", "ens-2-iid4": "0.1"}  # its members' rate, not that of the first row
    assert names(ladder.wanted(["ens-2-iid4"], own, RATES, (1, 2))) == [
        *first, "sm-4-iid4-lr0.2-seed1", "ens-2-iid4-lr0.1-seed1", "sm-4-iid4-lr0.1-seed1", "ens-2-iid4-lr0.1-seed2",
    ]  # fmt: skip


def test_a_rate_is_chosen_by_valid_once_all_have_ended_or_failed(tmp_path):
    study = ladder.Study(SIZE, tmp_path, RATES, (1,))
    runs_of(tmp_path, {("sm-4", "0.1", 1): 20.0, ("sm-12", "0.1", 1): 20.0, ("sm-12", "0.2", 1): 10.0})
    assert study.best_rates(study.ended()) == {"sm-12": "0.2"}
    study.failed["sm-4-lr0.2-seed1"] = "it diverged"
    assert study.best_rates(study.ended()) == {"sm-4": "0.1", "sm-12": "0.2", "ens-2": "0.1", "ens-4": "0.1"}
    assert '"sm-12": "0.2"' in (tmp_path / "rates.json").read_text()


def test_what_is_kept_is_not_trained_again(records):
    ended = {(row, rate, 1): 20.0 for row in ("sm-4", "sm-12") for rate in RATES}
    tables.keep(SIZE.archive, runs_of(records / "elsewhere", ended))
    study = ladder.Study(SIZE, records / "here", RATES, (1, 2))
    todo, _ = study.left(["sm-4", "sm-12"])
    assert names(todo) == ["sm-4-lr0.1-seed2", "sm-12-lr0.1-seed2"]


def run(*options):
    return ladder.main([*map(str, options)])


def test_a_dry_run_says_tokens_passes_and_hours_and_writes_nothing(records, capsys):
    assert run("--width", 24, "--rows", "table2", "--runs", records / "R", "--dry-run") == 0
    said = capsys.readouterr().out
    for words in ("50,424 parameters", "453,816 tokens", "10 passes: 2,216 updates", "hours of a core"):
        assert words in said
    assert "--num-experts 4 " in said and "--max-update 2216 " in said
    assert not (records / "R").exists()


def test_seeds_are_trained_side_by_side_and_found_as_runs_of_their_own(records, monkeypatch):
    calls = []

    def run(command, **options):
        calls.append(command)
        place = command.index("--seed") + 1
        seeds = [int(word) for word in itertools.takewhile(str.isdigit, command[place:])]
        path = Path(command[command.index("--run") + 1])
        for seed in seeds:
            folder = path / f"seed-{seed}" if len(seeds) > 1 else path
            write_run(folder, [30.0, 20.0], stream=text_stream(2), seed=seed)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(ladder.subprocess, "run", run)
    study = ladder.Study(SIZE, records, RATES, (1, 2, 3))
    study.train(["sm-4"])
    assert [call[call.index("--seed") + 1 : call.index("--save-every")] for call in calls] == [["1"], ["1"], ["2", "3"]]
    assert {(row, seed) for row, _, seed in study.ended()} == {("sm-4", 1), ("sm-4", 2), ("sm-4", 3)}
    assert ladder.Training("deeper-auto", "0.1", 2).together(study.left(["deeper-auto"])[0]) == [
        ladder.Training("deeper-auto", "0.1", 2)
    ]


def test_what_gets_wider_is_told_its_widths_and_nothing_else_of_them(tmp_path):
    study = ladder.Study(SIZE, tmp_path, RATES, (1,))
    grows = study.command(ladder.Training("wider-1-1-4-4", "0.1", 1))
    assert grows[grows.index("--grow-schedule") + 1] == "embed-dim=8,8,32,32 ffn-dim=32,32,128,128"
    assert "--decoder-embed-dim" not in grows and "--decoder-ffn-embed-dim" not in grows
    fixed = study.command(ladder.Training("width-4", "0.1", 1))
    assert fixed[fixed.index("--decoder-embed-dim") + 1] == "32"
    assert fixed[fixed.index("--decoder-attention-heads") + 1] == "4"  # as many as the other has in the end


def test_a_carried_rate_stays_up_or_falls_from_the_first_mega_batch_on(tmp_path):
    study = ladder.Study(SIZE, tmp_path, RATES, (1,))
    for row, scheduler, warmup in (("wsd-20-union", "fixed", 31), ("sqrt-20-union", "inverse_sqrt", 103)):
        command = study.command(ladder.Training(row, "0.1", 1))
        assert command[command.index("--lr-scheduler") + 1] == scheduler
        assert command[command.index("--warmup-updates") + 1] == str(warmup) and "--total-num-update" not in command


def test_another_corpus_has_a_folder_and_records_of_its_own_and_rows_that_need_no_others(records, capsys):
    assert run("--width", 16, "--corpus", "python", "--rows", "width-1", "--runs", records / "R", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"{records}/R/16-python/width-1-lr0.008-seed1" in said and "sm-4" not in said
    assert ladder.Size(16, "python").archive == "lm-ladder-16-python"


def test_more_passes_have_a_folder_and_records_of_their_own_and_as_many_more_updates(records, capsys):
    assert run("--width", 16, "--passes", 20, "--rows", "sm-4", "--runs", records / "R", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"{records}/R/16-20-passes/sm-4-lr0.008-seed1" in said and "20 passes: 2,055 updates" in said
    assert "--max-update 2055" in said
    assert ladder.Size(16, "python", 20).archive == "lm-ladder-16-python-20-passes"
    with pytest.raises(SystemExit):
        run("--width", 16, "--passes", 0)
    assert "--passes: 0 found" in capsys.readouterr().err


def test_definitions_of_pythons_library_become_a_stream(tmp_path, monkeypatch):
    sources = {"a.py": "import os\nclass A:\n    x = 1\n\n\ndef f():\n    pass\n", "test/b.py": "def g(): 0"}
    for name, source in sources.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(source)
    monkeypatch.setattr(ladder.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert [*ladder._definitions()] == ["class A:\n    x = 1\n", "def f():\n    pass\n"]
    with pytest.raises(AlmaError, match="--corpus python: 8 words, --width 16 needs 247,843; give more text, or"):
        run("--width", 16, "--corpus", "python", "--runs", tmp_path / "R")


def test_a_stream_that_shifts_begins_with_text_and_ends_with_code(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "_definitions", lambda: iter(["def f(): pass"] * 10))
    monkeypatch.setattr(ladder.Size, "words", 36)
    (tmp_path / "prose.txt").write_text("three words here\n" * 10)
    ladder._write_words([tmp_path / "prose.txt"], ladder.Size(16, "shift"), tmp_path / "out")
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    code = [[each["text"].startswith("def") for each in found if each["megabatch"] == number] for number in range(4)]
    assert code == [[False] * 3, [False, False, True], [False, True, True], [True] * 3]


def test_too_little_text_is_one_line_with_the_words_that_are_there_and_needed(records):
    text = records / "text.txt"
    text.write_text("some words\n" * 50)
    with pytest.raises(AlmaError, match=r"text.txt: 100 words, --width 16 needs 328,005; give more text, or a smaller"):
        run("--width", 16, "--text", text, "--runs", records / "R")
    assert [path.name for path in (records / "R/16").iterdir()] == ["stream.lock"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--rates", "0.01", "--rows", "anytime"],
            r"--rates 0.01: one rate, and sm-4-iid2 is what others are measured",
        ),
        (["--rows", "sm-5"], "--rows sm-5: no such row; choose from main, table1, "),
        (["--corpus", "python", "--width", "24"], "--corpus python --width 24: tokens for a word are known for 16"),
        (["--text", "nowhere.txt"], "--text: no file nowhere.txt"),
        ([], "--text: not given, nor is TEXT"),
    ],
)
def test_options_that_cannot_be_are_one_line(options, words, records, monkeypatch):
    monkeypatch.delenv("TEXT", raising=False)
    with pytest.raises(AlmaError, match=words):
        run("--width", 16, "--runs", records / "R", *options)
