"""``recipes/monthly``: a month for each topic of articles, and a benchmark that resumes."""

import json
import lzma
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError

MONTHLY = Path(__file__).parents[2] / "recipes/monthly"
SCRIPT = MONTHLY / "streams.py"


def test_each_month_has_the_articles_of_one_topic_cut_after_a_paragraph(tmp_path):
    topics, longest, main = (runpy.run_path(str(SCRIPT))[name] for name in ("TOPICS", "LONGEST", "main"))
    paragraph = "A paragraph of no topic. " * 8
    sentences = [f"It has {' '.join(words.split()[:2])}." for words in topics.values()]
    articles = [f"Title {number}\n{each} More.\n" + f"{paragraph}\n" * 40 for number in range(2) for each in sentences]
    articles.insert(3, f"Nothing\n{paragraph}\n" * 4)  # no topic
    rows, offset = ["shard\tbyte_offset\tnbytes\tcurid\ttitle"], 0
    for article in articles:
        rows.append(f"0\t{offset}\t{len(article)}\t1\tT")
        offset += len(article)
    (tmp_path / "t.tsv.xz").write_bytes(lzma.compress("\n".join(rows).encode()))
    (tmp_path / "0.txt.xz").write_bytes(lzma.compress("".join(articles).encode()))
    words = [*(str(tmp_path / name) for name in ("t.tsv.xz", "0.txt.xz")), "--out", str(tmp_path), "--size", "5k"]
    main(["wikipedia", *words])
    for shard in (lzma.compress(b"\xa9\n" * 9_999), b"no archive"):  # another corpus cuts a character
        (tmp_path / "0.txt.xz").write_bytes(shard)
        with pytest.raises(AlmaError, match=r"t.tsv.xz: not a table of these text files"):
            main(["wikipedia", *words])
    for number, sentence in enumerate(sentences, start=1):
        documents = (tmp_path / f"{number}.txt").read_text().strip().split("\n\n")
        assert len(documents) == (2 if number in (2, 4) else 1)  # months differ in length
        for document in documents:
            assert sentence in document and "Nothing" not in document
            assert document.endswith(paragraph.strip()[-9:]) or document.endswith(paragraph)
            assert longest["wikipedia"] - len(paragraph) <= len(document) <= longest["wikipedia"]


def test_cron_also_trains_months_that_an_earlier_call_missed(tmp_path, monkeypatch):
    for month in ("2026-07", "2026-08", "2026-09", "2026-10"):
        (tmp_path / "inbox" / month).mkdir(parents=True)
    (fake := tmp_path / "bin/alma-update").parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$2"\ncase $2 in *08) exit 3;; esac\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "MONTH": "2026-09"}
    words = [str(MONTHLY / "cron.sh"), f"{tmp_path / 'M'}/", str(tmp_path / "inbox")]
    assert subprocess.run(words, env=environment, check=False).returncode == 3
    assert [line[-2:] for line in (tmp_path / "M.log").read_text().split()] == ["07", "08", "09"]


def test_the_benchmark_has_one_seed_of_alma_update(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "1.txt", "--out", str(tmp_path / "out"), "--seeds", "1", "2"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(MONTHLY / "bench.py"), run_name="__main__")
    assert "--seeds: alma-update has only seed 1" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_killed_benchmark_runs_an_arrival_again_whose_row_was_cut_off(tmp_path):
    bench = runpy.run_path(str(MONTHLY / "bench.py"))
    path = tmp_path / "results.csv"
    stage = {name: {"bits_per_byte": 2.5} for name in ("test", "valid")} | {"num_params": 9, "train_flops": 7e11}
    stage["holdouts"] = [{"megabatch": 0, "bits_per_byte": 2.0}, {"megabatch": 1, "bits_per_byte": 3.0}]
    (tmp_path / "stage.json").write_text(json.dumps(stage))
    for arrival in (0, 1):
        bench["add_row"](path, tmp_path, ("update", 1, arrival), None, 4.0)
    path.write_text((complete := path.read_text())[:-3])
    assert bench["has_row"](path, "update", 1, 0) and not bench["has_row"](path, "update", 1, 1)
    bench["add_row"](path, tmp_path, ("update", 1, 1), None, 4.0)
    assert path.read_text() == complete
    bench["add_row"](path, tmp_path, ("new-1", 2, 0), None, 4.0)  # a policy with another seed than the first row
    assert "| alma-update | 8 | 1.4 | 2.000 | 2.500 |" in "".join(bench["table"](bench["read_rows"](path), 2))
    bench["draw"](bench["read_rows"](path), tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 1000


def test_a_benchmark_mixes_no_rows_of_other_texts_or_options_and_names_the_command_that_failed(tmp_path, monkeypatch):
    bench = runpy.run_path(str(MONTHLY / "bench.py"))
    monkeypatch.setattr("subprocess.run", lambda words, **how: subprocess.CompletedProcess(words, 1))
    failed, mixed = "alma-prep-text failed .exit status 1.; run", "settings.json: .* began with other texts or"
    for text, words, message in (("1", [], failed), ("1", ["--lr", "1"], mixed), ("2", [], mixed)):
        (path := tmp_path / "1.txt").write_text(text)
        with pytest.raises(AlmaError, match=message):
            bench["main"]([str(path), "--out", str(tmp_path / "out"), "--", *words])
