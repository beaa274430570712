"""Building a stream: one process at a time, nothing through links, no remaining files."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from data_prep.text import command
from data_prep.text.command import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from tests.forked import wait_until

MORE = ["--append", "--megabatches", "1", "--workers", "1"]


def write_text(path: Path, word: str, num_documents: int = 60) -> str:
    path.write_text("\n\n".join(f"{word} {number} " * 5 for number in range(num_documents)))
    return str(path)


@pytest.fixture
def text_stream(tmp_path: Path) -> Path:
    arguments = [write_text(tmp_path / "a.txt", "first"), "--out", str(tmp_path / "S"), "--megabatches", "2"]
    assert main([*arguments, "--vocab-size", "300", "--workers", "1"]) == 0
    return tmp_path / "S"


def test_appending_reads_the_manifest_under_the_lock(text_stream: Path, tmp_path: Path, monkeypatch) -> None:
    """Two commands at once: the second starts before the first changes the manifest."""
    enter = command.work_folder

    @contextlib.contextmanager
    def append_another_first(out: Path, program: str) -> Iterator[Path]:
        monkeypatch.setattr(command, "work_folder", enter)
        assert main([write_text(tmp_path / "b.txt", "second"), "--out", str(text_stream), *MORE]) == 0
        with enter(out, program) as root:
            yield root

    monkeypatch.setattr(command, "work_folder", append_another_first)
    assert main([write_text(tmp_path / "c.txt", "third"), "--out", str(text_stream), *MORE]) == 0
    stream = Stream.open(text_stream)
    stream.verify([split.name for split in stream.splits])
    assert stream.num_megabatches == 4
    assert [record["inputs"][0]["name"] for record in stream.history] == ["a.txt", "b.txt", "c.txt"]


def test_appending_does_not_write_through_a_link(text_stream: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/train.bin").write_text("mine")
    (text_stream / "megabatch-002").symlink_to(tmp_path / "precious")
    before = (text_stream / "stream.json").read_bytes()
    with pytest.raises(AlmaError, match="at megabatch-002, found a symbolic link"):
        main([write_text(tmp_path / "b.txt", "second"), "--out", str(text_stream), *MORE])
    assert (tmp_path / "precious/train.bin").read_text() == "mine"
    assert (text_stream / "stream.json").read_bytes() == before


def test_no_file_remains_after_a_signal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "data_prep.text.command", "-", "--out", str(tmp_path / "S"), "--megabatches", "1"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: [*tmp_path.glob(".S.building/*/input-0")])
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert complaints.count("\n") == 1
    assert os.listdir(tmp_path) == []
