"""Regret of arms against retraining, from runs whose losses are known."""

import math

import pytest

from tests.recipes.programs import load
from tests.report.fakes import text_stream, write_run

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
    assert "| ema | 0.1 | 2 | 30.00 ± 0.00 | 20.10 ± 0.00 |" in said
    assert "(worse than 1 %)" in next(line for line in said.splitlines() if line.startswith("| paper | 2 |"))


def test_the_differences_from_an_arm_stand_alone(runs, capsys):
    arms.main(["--runs", str(runs), "--against", "paper", "--differences", "--seeds", "1-1"])
    said = capsys.readouterr().out
    assert said.startswith("| regret against paper, nats |")
    assert f"{math.log(20.1 / 22):+.4f} (one seed)" in said


def test_seeds_that_are_not_there_are_one_line(runs):
    with pytest.raises(SystemExit, match="none of these --seeds"):
        arms.main(["--runs", str(runs), "--seeds", "900-901"])
