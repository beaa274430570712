import os

from fairseq_alma import files
from fairseq_alma.files import VerifiedFiles, once_per_file


def test_a_verified_file_is_forgotten_once_it_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1.0)
    path, verified = tmp_path / "file", VerifiedFiles()
    path.write_text("a")
    verified.add(path, "sum")
    assert verified.has(path, "sum") and not verified.has(path, "other sum")
    other = VerifiedFiles()
    other.take(verified.since(0))
    assert other.has(path, "sum") and verified.since(1) == []
    path.write_text("bb")
    assert not verified.has(path, "sum") and not verified.has(tmp_path / "none", "sum")


def test_a_file_that_was_changed_a_moment_ago_is_not_taken_for_settled(tmp_path):
    path, verified = tmp_path / "file", VerifiedFiles()
    path.write_text("a")
    now = path.stat().st_ctime
    os.utime(path)
    verified.add(path)
    assert now and not verified.has(path)


def test_what_a_file_says_is_read_again_only_when_it_has_changed(tmp_path):
    reads = []
    read = once_per_file(lambda path: reads.append(path) or path.read_text())
    path = tmp_path / "file"
    path.write_text("a")
    assert read(path) == read(path) == "a" and len(reads) == 1
    path.write_text("bb")
    assert read(path) == "bb"
