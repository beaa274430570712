"""``recipes/lm/ladder.py`` prints the remaining runs, refuses short text, and makes tables of complete runs."""

import importlib.util
import re
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from tests.report.fakes import text_stream, write_run

PATH = Path(__file__).parents[2] / "recipes" / "lm" / "ladder.py"


@pytest.fixture
def ladder(monkeypatch):
    spec = importlib.util.spec_from_file_location("ladder", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "ladder", module)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_prints_hours_and_both_rates_of_a_row_for_each_schedule(ladder, tmp_path, capfd):
    ladder.main(["--rows", "main", "--runs", str(tmp_path), "--dry-run"])
    head, *commands = capfd.readouterr().out.splitlines()
    assert re.match(r"width 32: [\d,]+ tokens and [\d,]+ updates for each mega-batch; \d+\.\d hours of one core", head)
    rates = [float(re.search(r"--lr (\S+)", command)[1]) for command in commands]
    assert len(rates) == 4 and rates[1] == pytest.approx(2 * rates[0], rel=0.05)
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_too_short_is_one_line_with_the_bytes_it_has_and_needs(ladder, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a paragraph\n" * 10)
    monkeypatch.setattr(ladder.Rung, "rates", ("0.01", "0.02"))
    with pytest.raises(AlmaError, match=r"--text: expected 10,[\d,]+ bytes for width 32, found 120; give more files"):
        ladder.main(["--text", str(tmp_path / "text.txt"), "--runs", str(tmp_path / "runs")])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "text.txt"]


def test_tables_have_ratios_those_of_the_paper_regret_and_the_share_of_the_way(ladder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder.Rung, "rates", ("0.01", "0.02"))
    for row, ppl in {"sm-4": 50.0, "sm-12": 40.0, "gmoe": 44.72, "linear-iid4": 45.0}.items():
        for seed in (1, 2):
            for rate, factor in (("0.01", 1.0), ("0.02", 1.1))[: 3 - seed]:
                values = [ppl * factor] if "iid" in row else [90, 80, 70, ppl * factor]
                options = {"iid": 4} if "iid" in row else {}
                folder = tmp_path / "32-10-passes" / f"{row}-lr{rate}-seed{seed}"
                write_run(folder, values, stream=text_stream(4), seed=seed, **options)
    ladder.main(["--tables", "--runs", str(tmp_path)])
    out = capsys.readouterr().out
    assert "| sm-12 | 40.00 | 0.800 ± 0.000 | 0.896 | 2 |" in out
    assert "| sm-4 | – | – | +11.11 ± 0.00 |" in out and "cover 50 % of the way." in out
    assert (tmp_path / "ladder.png").stat().st_size and "## Width 32" in (tmp_path / "tables.md").read_text()
