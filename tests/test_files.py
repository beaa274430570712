"""A file or folder appears complete or not at all; nothing else changes, and no temporary file remains."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import locked, once_per_file, open_atomically, publish, sweep, work_folder

HANG = """
import pathlib, sys, time
from fairseq_alma.files import open_atomically
with open_atomically(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, content: bytes = b"new") -> None:
    with open_atomically(path) as file:
        file.write(content)


def test_the_file_before_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/file"
    write(path, b"old")
    with open_atomically(path) as file:
        file.write(b"new" * 100_000)
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 100_000 and names(path.parent) == ["file"]


@pytest.mark.parametrize(("durable", "synchronised"), [(True, 2), (False, 0)])
def test_file_and_folder_are_fsynced_if_durable(durable, synchronised, tmp_path, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", seen.append)
    with open_atomically(tmp_path / "file", durable=durable) as file:
        file.write(b"new")
    assert len(seen) == synchronised


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(143)])
def test_an_exception_keeps_the_old_file_and_removes_the_new_one(error: BaseException, tmp_path: Path) -> None:
    write(tmp_path / "file", b"old")
    with pytest.raises(type(error)) as raised, open_atomically(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    assert raised.value is error
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "body", ["file.write(b'x' * (1 << 20))", "import torch; torch.save({'a': torch.zeros(1 << 20)}, file)"]
)
def test_a_full_disk_is_an_os_error_that_names_the_file(body: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource\nfrom pathlib import Path\nfrom fairseq_alma.files import open_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        f"try:\n    with open_atomically(Path({str(path)!r})) as file:\n        {body}\n"
        "except OSError as error:\n    print(error.errno, error.filename)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (ended.stdout, ended.stderr) == (f"{errno.EFBIG} {path}\n", "")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("precious"), os.mkfifo, os.mkdir])
def test_only_a_regular_file_is_replaced(make, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    make(tmp_path / "file")
    message = r"file: expected a regular file or a new path, found (a symbolic link|a special file|a folder);"
    with pytest.raises(AlmaError, match=message):
        write(tmp_path / "file")
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_the_next_writer_and_sweep_remove_the_file_of_a_killed_writer(tmp_path: Path) -> None:
    for next_one in (lambda: sweep(tmp_path), lambda: write(tmp_path / "a")):
        writer = subprocess.Popen([sys.executable, "-c", HANG, tmp_path / "a"], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"writing\n"
        writer.kill()
        writer.wait()
        assert names(tmp_path) == [".a.tmp"]
        next_one()
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"new"


def fill(out: Path) -> None:
    with work_folder(out, "alma-export") as folder:
        (folder / "a").write_text("complete")
        (folder / "b").mkdir()
        (folder / "b/c").write_text("complete")
        publish(folder, out)


def fill_or_die(out: Path, dies_at: int) -> int:
    """Write a folder in a process that is killed before its n-th operation in it; return its status."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and ".building" in str(arguments[0]):
            seen.append(event)
            if len(seen) == dies_at:
                os._exit(9)

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.addaudithook(hook)
    try:
        fill(out)
    finally:
        os._exit(0)


def test_a_folder_is_complete_or_not_there_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    dies_at = 1
    while fill_or_die(tmp_path / "out", dies_at):
        if not (tmp_path / "out").exists():
            fill(tmp_path / "out")
        assert (tmp_path / "out/b/c").read_text() == (tmp_path / "out/a").read_text() == "complete"
        assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a", "b"]
        with pytest.raises(AlmaError, match=r"--out .*out: Directory not empty; give the name of a new folder"):
            fill(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
        dies_at += 1
    assert dies_at > 5 and names(tmp_path) == ["out"]


def test_a_lock_file_and_a_work_folder_refuse_a_second_process(tmp_path: Path, no_patience, monkeypatch) -> None:
    line = rf"R: another alma-stream \(process {os.getpid()} on .*\) holds the lock; wait until that process exits"
    with locked(tmp_path / ".lock", "R"), pytest.raises(AlmaError, match=line), locked(tmp_path / ".lock", "R"):
        pass
    with locked(tmp_path / ".lock", "R", shared=True), locked(tmp_path / ".lock", "R", shared=True):
        pass
    refused = pytest.raises(AlmaError, match=r"out: another alma-export holds the lock; wait until that process exits")
    with work_folder(tmp_path / "out", "alma-export"), refused:
        fill(tmp_path / "out")
    with pytest.raises(KeyError), work_folder(tmp_path / "new/out", "alma-export"):
        raise KeyError
    assert names(tmp_path) == [".lock"]
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(AlmaError, match=r"file.tmp: cannot be locked \(No locks available\); use another file system"):
        write(tmp_path / "file")


def test_a_file_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    reads: list[Path] = []
    read = once_per_file(lambda path: reads.append(path) or path.read_text())
    for content in ("a", "b"):
        write(tmp_path / "file", content.encode())
        assert read(tmp_path / "file") == read(tmp_path / "file") == content
    assert len(reads) == 2
