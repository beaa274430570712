"""The folder in which a stream is built: one process at a time, nothing through links, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.build_folder import BuildFolder
from data_prep.text.command import main
from fairseq_alma.data.image_stream import write_image_stream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import WORK_MARKER
from tests.forked import wait_until

MORE = ["--append", "--megabatches", "1", "--workers", "1"]


def small_stream(root: Path) -> Stream:
    images = np.arange(12 * 4, dtype=np.uint8).reshape(12, 1, 2, 2)
    return write_image_stream(root, images, np.arange(12) % 3, 10, "tiny", 3, 2, 1)


def write_text(path: Path, word: str, num_documents: int = 60) -> str:
    path.write_text("\n\n".join(f"{word} {number} " * 5 for number in range(num_documents)))
    return str(path)


@pytest.fixture
def text_stream(tmp_path: Path) -> Path:
    arguments = [write_text(tmp_path / "a.txt", "first"), "--out", str(tmp_path / "S"), "--megabatches", "2"]
    assert main([*arguments, "--vocab-size", "300", "--workers", "1"]) == 0
    return tmp_path / "S"


@pytest.mark.parametrize("kind", ["folder", "nothing", "file"])
def test_a_link_in_the_place_of_the_build_folder_is_refused_and_its_target_left_alone(kind: str, tmp_path) -> None:
    target = tmp_path / "precious"
    if kind == "folder":
        target.mkdir()
        (target / "mine").write_text("mine")
    elif kind == "file":
        target.write_text("mine")
    (tmp_path / ".S.building").symlink_to(target)
    with pytest.raises(AlmaError, match=r"\.S\.building: no folder"), BuildFolder(tmp_path / "S", "alma-prep-text"):
        pass
    assert (tmp_path / ".S.building").is_symlink()
    assert target.exists() == (kind != "nothing")
    assert [path.read_text() for path in tmp_path.rglob("mine")] == ["mine"] * (kind == "folder")


def test_links_in_a_left_over_are_removed_and_their_targets_are_not(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/mine").write_text("mine")
    (tmp_path / ".S.building").mkdir()
    (tmp_path / ".S.building" / WORK_MARKER).touch()
    (tmp_path / ".S.building/link").symlink_to(tmp_path / "precious")
    with BuildFolder(tmp_path / "S", "alma-prep-text") as build:
        assert list(build.path.iterdir()) == []
    assert (tmp_path / "precious/mine").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["precious"]


@pytest.mark.parametrize("marker", [True, False])
def test_only_what_a_command_has_made_is_emptied(marker: bool, tmp_path: Path) -> None:
    """A kill at any moment leaves an empty folder or one with the marker."""
    (tmp_path / ".S.building").mkdir()
    with BuildFolder(tmp_path / "S", "alma-prep-text") as build:
        build.path.joinpath("half").write_text("half")
        left = tmp_path / "left"
        shutil.copytree(tmp_path / ".S.building", left)
    left.rename(tmp_path / ".S.building")
    if marker:
        with BuildFolder(tmp_path / "S", "alma-prep-text") as build:
            assert list(build.path.iterdir()) == []
        assert os.listdir(tmp_path) == []
    else:
        (tmp_path / ".S.building" / WORK_MARKER).unlink()
        refused = pytest.raises(AlmaError, match=r"\.S\.building: a folder that alma-prep-text has not made")
        with refused, BuildFolder(tmp_path / "S", "alma-prep-text"):
            pass
        assert (tmp_path / ".S.building/content/half").read_text() == "half"


def test_a_link_as_out_stands_for_the_folder_that_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "disk/real").mkdir(parents=True)
    (tmp_path / "S").symlink_to(tmp_path / "disk/real")
    with BuildFolder(tmp_path / "S", "alma-prep-images") as build:
        build.publish_stream(small_stream(build.path))
    assert (tmp_path / "S").is_symlink()
    assert Stream.open(tmp_path / "disk/real").num_megabatches == 2
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_another_process_that_begins_after_publication_keeps_its_folder(tmp_path: Path) -> None:
    with BuildFolder(tmp_path / "S", "alma-prep-images") as first:
        first.publish_stream(small_stream(first.path))
        second = BuildFolder(tmp_path / "S", "alma-prep-images").__enter__()
    assert second.path.is_dir()
    second.__exit__()
    assert os.listdir(tmp_path) == ["S"]


def test_appending_reads_the_manifest_under_the_lock(text_stream: Path, tmp_path: Path, monkeypatch) -> None:
    """Two commands at once: the second begins with the manifest that the first has not changed yet."""
    enter = BuildFolder.__enter__

    def append_another_first(build: BuildFolder) -> BuildFolder:
        monkeypatch.setattr(BuildFolder, "__enter__", enter)
        assert main([write_text(tmp_path / "b.txt", "second"), "--out", str(text_stream), *MORE]) == 0
        return enter(build)

    monkeypatch.setattr(BuildFolder, "__enter__", append_another_first)
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
    with pytest.raises(AlmaError, match="megabatch-002 in it is a symbolic link"):
        main([write_text(tmp_path / "b.txt", "second"), "--out", str(text_stream), *MORE])
    assert (tmp_path / "precious/train.bin").read_text() == "mine"
    assert (text_stream / "stream.json").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_prep.text.command", "-", "--out", str(tmp_path / "S"), "--megabatches", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: [*tmp_path.glob(".S.building/content/*/input-0")])
    process.send_signal(number)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert complaints.count("\n") == 1
    assert os.listdir(tmp_path) == []
