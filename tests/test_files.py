"""A file appears whole or not at all; nothing else is touched, and nothing stays behind."""

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from fairseq_alma import files
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import (
    VerifiedFiles,
    new_folder,
    once_per_file,
    open_atomically,
    replace_folder,
    sweep,
    write_together,
)

WRITE_AND_HANG = """
import sys, time
from pathlib import Path
from fairseq_alma.files import open_atomically
with open_atomically(Path(sys.argv[1])) as file:
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


def test_the_file_before_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/file"
    write(path, b"old")
    with open_atomically(path) as file:
        file.write(b"new" * 100_000)
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 100_000
    assert names(path.parent) == ["file"]


def test_text_is_utf_8_and_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    with open_atomically(tmp_path / "text", "w") as file:
        file.write("gîte\n")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "text").read_bytes() == "gîte\n".encode()
    assert (tmp_path / "text").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(("durable", "synchronised"), [(True, 2), (False, 0)])
def test_file_and_folder_are_on_the_disk_unless_that_is_not_wanted(
    durable: bool, synchronised: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", seen.append)
    with open_atomically(tmp_path / "file", durable=durable) as file:
        file.write(b"new")
        assert names(tmp_path) != ["file"]
    assert names(tmp_path) == ["file"] and len(seen) == synchronised


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(143)])
def test_whatever_is_raised_leaves_the_file_before_and_nothing_else(error: BaseException, tmp_path: Path) -> None:
    write(tmp_path / "file", b"old")
    with pytest.raises(type(error)) as raised, open_atomically(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    assert raised.value is error
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "body", ["file.write(b'x' * (1 << 20))", "import torch; torch.save({'a': torch.zeros(1 << 20)}, file)"]
)
def test_a_disk_that_takes_no_more_is_an_os_error_of_that_file_whoever_writes(body: str, tmp_path: Path) -> None:
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
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_folder_that_may_not_be_written_to_is_an_error_of_the_file(tmp_path: Path, monkeypatch) -> None:
    def refuse(name, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", name)

    with monkeypatch.context() as context:
        context.setattr(os, "open", refuse)
        with pytest.raises(PermissionError) as raised:
            write(tmp_path / "file")
    assert raised.value.filename == str(tmp_path / "file")


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("precious"), os.mkfifo, os.mkdir])
def test_only_a_regular_file_is_replaced(make, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    make(tmp_path / "file")
    before = (tmp_path / "file").lstat()
    with pytest.raises(AlmaError, match=r"file: (a symbolic link|no regular file|a folder), which is not replaced"):
        write(tmp_path / "file")
    assert (tmp_path / "file").lstat().st_ino == before.st_ino
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_devices_are_not_replaced() -> None:
    with pytest.raises(AlmaError, match="/dev/null: no regular file"):
        write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    def hang(name: str) -> subprocess.Popen:
        writer = subprocess.Popen([sys.executable, "-c", WRITE_AND_HANG, tmp_path / name], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"writing\n"
        return writer

    killed, living = hang("a"), hang("b")
    try:
        assert len(names(tmp_path)) == 2
        killed.kill()
        killed.wait()
        (tmp_path / ".a.0123456789abcdef.tmp.bak").write_text("another's")
        (tmp_path / ".a.fedcba9876543210.tmp").symlink_to("elsewhere")
        sweep(tmp_path)
        sweep(tmp_path / "no folder")
        left = names(tmp_path)
        assert left[:2] == [".a.0123456789abcdef.tmp.bak", ".a.fedcba9876543210.tmp"]
        assert len(left) == 3
        assert left[2].startswith(".b.")
        living.send_signal(signal.SIGKILL)
        living.wait()
        write(tmp_path / "b")
        assert names(tmp_path) == [*left[:2], "b"]
    finally:
        for writer in (killed, living):
            writer.kill()
            writer.wait()


def test_a_name_of_any_length_that_the_file_system_takes_will_do(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write(path)
    assert names(tmp_path) == ["é" * 127]


def test_files_that_are_written_together_are_written_at_the_same_time(tmp_path: Path) -> None:
    meeting = threading.Barrier(5)

    def wait_and_write(number: int) -> None:
        with open_atomically(tmp_path / f"{number}") as file:
            meeting.wait(timeout=600)
            file.write(b"%d" % number)

    write_together([partial(wait_and_write, number) for number in range(5)])
    assert [(tmp_path / f"{number}").read_bytes() for number in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert len(names(tmp_path)) == 5


def test_of_files_that_are_written_together_one_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def write_or_fail(number: int) -> None:
        if number == 1:
            raise OSError(errno.ENOSPC, "No space left on device", f"{number}")
        write(tmp_path / f"{number}")

    with pytest.raises(OSError, match="No space left on device: '1'"):
        write_together([partial(write_or_fail, number) for number in range(3)])
    assert names(tmp_path) == ["0", "2"]


def write_folder_or_die(out: Path, dies_at: int) -> int:
    """Write a folder in a process that is killed before its n-th operation below the folder's parent; its status."""
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and ".building" in str(arguments[0]):
            seen += 1
            if seen == dies_at:
                os._exit(9)

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.addaudithook(hook)
    try:
        fill(out)
    finally:
        os._exit(0)
    return 0


def fill(out: Path) -> None:
    with new_folder(out, "--out ", "alma-export") as folder:
        (folder / "a").write_text("whole")
        (folder / "b").mkdir()
        (folder / "b/c").write_text("whole")


def test_a_folder_is_whole_or_not_there_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    dies_at = 1
    while write_folder_or_die(tmp_path / "out", dies_at):
        if (tmp_path / "out").exists():
            assert (tmp_path / "out/b/c").read_text() == (tmp_path / "out/a").read_text() == "whole"
            with pytest.raises(AlmaError, match="exists and is not empty"):
                fill(tmp_path / "out")
        else:
            fill(tmp_path / "out")
        assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a", "b"]
        shutil.rmtree(tmp_path / "out")
        dies_at += 1
    assert dies_at > 10
    assert names(tmp_path) == ["out"]


def test_two_writers_of_one_folder_are_told_of_each_other(tmp_path: Path) -> None:
    refused = pytest.raises(AlmaError, match=r"out: another alma-export is at work on it .*; wait for its end")
    with new_folder(tmp_path / "out", "--out ", "alma-export"), refused:
        fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_is_put_there_meanwhile_is_replaced_only_where_that_was_asked_for(replace: bool, tmp_path: Path):
    refused = contextlib.nullcontext() if replace else pytest.raises(AlmaError, match="a: exists already")
    with refused, open_atomically(tmp_path / "a", "w", replace=replace) as file:
        file.write("new")
        (tmp_path / "a").write_text("meanwhile")
    assert (tmp_path / "a").read_text() == ("new" if replace else "meanwhile") and names(tmp_path) == ["a"]
    with open_atomically(tmp_path / "b", "w", replace=replace) as file:
        file.write("new")
    assert (tmp_path / "b").read_text() == "new" and names(tmp_path) == ["a", "b"]


def test_what_is_put_in_a_folders_place_meanwhile_is_left_alone(tmp_path: Path) -> None:
    refused = pytest.raises(AlmaError, match=r"--out .*out: something was put there meanwhile")
    with refused, new_folder(tmp_path / "out", "--out ", "alma-export"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine").write_text("mine")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["mine"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_that_is_replaced_is_there_at_every_file_operation(can_exchange: bool, tmp_path: Path, monkeypatch):
    if not can_exchange:  # another system, where it is away for a moment and back at the end
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    new, out = tmp_path / ".out-new", tmp_path / "out"
    new.mkdir(), out.mkdir()
    can_exchange = files._exchange(new, out)  # a file system may know no such thing
    new.rmdir(), out.rmdir()
    seen = set()

    def look(frame, event, argument):
        seen.add((out / "name").is_file())

    for content in ("first", "second", "third"):
        new.mkdir()
        (new / "name").write_text(content)
        sys.setprofile(look if content != "first" else None)
        try:
            replace_folder(new, out)
        finally:
            sys.setprofile(None)
        assert (out / "name").read_text() == content and names(tmp_path) == ["out"]
    assert seen == ({True} if can_exchange else {True, False})


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
