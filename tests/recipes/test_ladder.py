"""``recipes/lm/ladder.py`` prints the remaining runs, refuses short text, and makes tables of complete runs."""

import fcntl
import importlib
import lzma
import re
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.text.train_options import Context, complete
from tests.report.fakes import text_stream, write_run


@pytest.fixture
def ladder(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes" / "lm")
    return importlib.import_module("ladder")


def test_a_dry_run_prints_hours_and_both_rates_of_a_row_for_each_schedule(ladder, tmp_path, capfd):
    ladder.main(["--rows", "main", "--width", "32", "48", "--runs", str(tmp_path), "--dry-run"])
    out = capfd.readouterr().out
    head = r"^width \d+: (\S+) tokens and [\d,]+ updates for each mega-batch; \d+\.\d hours of one core"
    rates = re.findall(r"--lr (\S+)", out)
    for tokens, found in zip(re.findall(head, out, re.MULTILINE), (rates[:4], rates[4:]), strict=True):
        # The rate that alma-stream will choose for the stream, which does not exist yet, and twice this rate.
        given = ["--arch", "alma_transformer_lm", "--max-update", "9"]
        rate = complete(given, Context(), [int(tokens.replace(",", ""))] * 4).chosen["--lr"]
        assert found == [rate, f"{2 * float(rate):g}"] * 2
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_damaged_or_too_short_is_one_line_with_the_bytes_it_needs(ladder, tmp_path, monkeypatch):
    def open_locked(file, open_text=ladder.open_text):  # another call of the same command waits
        with open(tmp_path / "32-10-passes/stream.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return open_text(file)

    monkeypatch.setattr(ladder, "open_text", open_locked)
    short = r"--text: expected 10,[\d,]+ bytes for width 32, found 120; give more files"
    for text, message in ((b"no archive", "a.xz: expected UTF-8"), (lzma.compress(b"a paragraph\n" * 10), short)):
        (tmp_path / "a.xz").write_bytes(text)
        with pytest.raises(AlmaError, match=message):
            ladder.main(["--text", str(tmp_path / "a.xz"), "--runs", str(tmp_path)])
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"a.xz", "stream.lock"}


def test_tables_have_ratios_those_of_the_paper_regret_and_the_share_of_the_way(ladder, tmp_path, capsys):
    for row, ppl in {"sm-4": 50.0, "sm-12": 40.0, "gmoe": 44.72, "linear-iid4": 45.0}.items():
        for seed in (1, 2):
            for rate, factor in (("0.03", 1.0), ("0.06", 1.1))[: 3 - seed]:
                values, options = ([ppl * factor], {"iid": 4}) if "iid" in row else ([90, 80, 70, ppl * factor], {})
                folder = tmp_path / "32-10-passes" / f"{row}-lr{rate}-seed{seed}"
                write_run(folder, values, stream=text_stream(4), seed=seed, **options)
    ladder.main(["--tables", "--runs", str(tmp_path)])
    out = capsys.readouterr().out
    assert "| sm-12 | 40.00 | 0.800 ± 0.000 | 0.896 | 2 |" in out
    assert "| sm-4 | – | – | +11.11 ± 0.00 |" in out and "cover 50 % of the way." in out
    assert (tmp_path / "ladder.png").stat().st_size and "## Width 32" in (tmp_path / "tables.md").read_text()
