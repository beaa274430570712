"""Regret of arms against retraining, from runs whose losses are known."""

import math
from pathlib import Path

import pytest

from tests.recipes.programs import load
from tests.report.fakes import image_stream, text_stream, write_run

arms = load("arms")


@pytest.fixture
def runs(tmp_path):
    """Two seeds of an arm, of the paper's way and of the oracle of two mega-batches."""
    stream = text_stream(2)
    for seed in (1, 2):
        write_run(tmp_path / f"paper-lr0.1-seed{seed}", [30.0, 22.0], stream=stream, seed=seed)
        write_run(tmp_path / f"oracle-k2-lr0.1-seed{seed}", [20.0], stream=stream, seed=seed, iid=2)
        write_run(tmp_path / f"ema-lr0.1-seed{seed}", [30.0, 20.1], stream=stream, seed=seed)
        write_run(tmp_path / f"ema-lr0.5-seed{seed}", [29.0, 29.0], stream=stream, seed=seed)
    (tmp_path / "stream").mkdir()
    return tmp_path


def test_an_arm_has_its_best_rate_and_its_regret_against_the_oracle_of_its_seed(runs, capsys):
    arms.main(["--runs", str(runs)])
    said = capsys.readouterr().out
    (row,) = (line for line in said.splitlines() if line.startswith("| ema | 2 |"))
    gap = math.log(20.1 / 20)
    assert f"+{gap:.4f} ± 0.0000 (within 1 %)" in row
    assert f" {100 * (1 - gap / math.log(22 / 20)):.0f} % " in row  # of the gap that the paper's way leaves
    assert "| ema | 0.1 | 2 | 30.00 ± 0.00 | 20.10 ± 0.00 | 0.670 |" in said
    assert "(worse than 1 %)" in next(line for line in said.splitlines() if line.startswith("| paper | 2 |"))


def test_the_differences_from_an_arm_stand_alone(runs, capsys):
    arms.main(["--runs", str(runs), "--against", "paper", "--differences", "--seeds", "1-1"])
    said = capsys.readouterr().out
    assert said.startswith("| difference from paper, nats |")
    assert f"{math.log(20.1 / 22):+.4f} (one seed)" in said


@pytest.mark.parametrize(
    ("values", "regret", "apart"),
    [
        ([-0.09, -0.10, -0.09], "within 1 %", "below by more than 1 %"),
        ([0.09, 0.10, 0.09], "worse than 1 %", "above by more than 1 %"),
        ([-0.009, -0.010, -0.010], "within 1 %", "not decided"),
        ([0.001, -0.001, 0.000], "within 1 %", "within 1 %"),
        ([0.05, -0.05, 0.0], "not decided", "not decided"),
    ],
)
def test_a_difference_has_two_sides_and_a_regret_has_one(values, regret, apart):
    assert arms.verdict(values, two_sided=False) == regret
    assert arms.verdict(values, two_sided=True) == apart


def test_what_is_far_below_another_arm_is_not_called_within_1_percent_of_it(runs, capsys):
    arms.main(["--runs", str(runs), "--against", "paper", "--differences"])
    ema = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| ema |"))
    assert f"{math.log(20.1 / 22):+.4f} ± 0.0000 (below by more than 1 %)" in ema
    arms.main(["--runs", str(runs), "--against", "oracle", "--differences"])
    assert "difference from oracle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "900-901"], r"none of these --seeds are there; there are ema \(seed 1 2\), oracle \(seed 1 2\), "),
        (["--seed", "99"], "--seed 99: no run has it; choose from 1, 2"),
        (["--against", "nosuch"], "--against nosuch: .*; choose from ema, oracle, paper"),
        (["--best-lr", "nosuch"], "--best-lr nosuch: .* there are ema"),
        (["--figure", "a-file/x.svg"], "a-file/x.svg: File exists"),
        (["--figure", "x.xyz"], "x.xyz: the name of a figure ends in .png, .pdf, .svg"),
        (["--figure", "x"], "x: the name of a figure ends in .png, .pdf, .svg"),
    ],
)
def test_what_is_not_there_is_one_line_that_names_what_is(options, said, runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    Path("a-file").touch()
    with pytest.raises(SystemExit, match=said) as refused:
        arms.main(["--runs", str(runs), *options])
    assert "\n" not in str(refused.value) and capsys.readouterr().out == ""


def test_a_figure_of_arms_without_an_oracle_is_one_line(tmp_path):
    write_run(tmp_path / "grow-lr0.1-seed1", [30.0, 22.0], stream=text_stream(2))
    with pytest.raises(SystemExit, match=r"--figure x.svg: complete runs of paper, .* are needed; there are grow"):
        arms.main(["--runs", str(tmp_path), "--figure", "x.svg"])


def test_a_folder_without_arms_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="nowhere: no such folder; give the folder"):
        arms.main(["--runs", f"{tmp_path}/nowhere"])
    write_run(tmp_path / "sm-4-w1-paper", stream=image_stream(2))
    with pytest.raises(SystemExit, match="no runs called ARM-lrLR-seedN in it"):
        arms.main(["--runs", str(tmp_path)])
    write_run(tmp_path / "paper-lr0.1-seed1", stream=image_stream(2))
    with pytest.raises(SystemExit, match="no runs on text called ARM-lrLR-seedN"):
        arms.main(["--runs", str(tmp_path)])


def test_an_arm_without_the_seed_that_chooses_rates_is_named(runs, capsys):
    write_run(runs / "pilot-lr0.1-seed0", [30.0, 20.0], stream=text_stream(2), seed=0)
    arms.main(["--runs", str(runs)])
    said = capsys.readouterr().err
    assert "left out: ema (seed 1 2), oracle (seed 1 2), paper (seed 1 2): no complete run" in said and "seed 0" in said
    arms.main(["--runs", str(runs), "--seed", "1"])
    assert "left out: pilot (seed 0)" in capsys.readouterr().err
