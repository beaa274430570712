"""What Linux alone has is used where its absence has been thought of: the package is for macOS too."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from fairseq_alma.terminal import die_with_parent, start_process

# By the notes on availability in the library reference of Python; and places in the file system.
NOT_ON_MACOS = {
    *("copy_file_range", "eventfd", "fdatasync", "getresgid", "getresuid", "getxattr", "listxattr", "memfd_create"),
    *("pidfd_open", "pidfd_send_signal", "pipe2", "posix_fadvise", "posix_fallocate", "removexattr"),
    *("sched_getaffinity", "splice", "unshare", "O_DIRECT", "setresuid", "setxattr", "O_PATH", "O_TMPFILE", "epoll"),
    *("sched_setaffinity", "sched_setscheduler", "setns", "sigtimedwait", "sigwaitinfo", "prlimit", "prctl"),
    *("mallopt", "malloc_trim", "F_SETPIPE_SZ", "F_OFD_SETLK", "SO_PEERCRED", "SO_PASSCRED"),
}
PLACES = ("/proc/", "/sys/", "/dev/shm", "\0fairseq")  # the last begins the name of a socket
GUARDS = ("sys.platform", "hasattr(", ".is_file()")


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NOT_ON_MACOS:
            yield node.attr, node
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PLACES):
            yield node.value, node


def _unguarded(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]

    def is_guarded(line: int) -> bool:
        around = [lines[one.lineno - 1 : one.end_lineno] for one in functions if one.lineno <= line <= one.end_lineno]
        return any(guard in part for found in around for part in found for guard in GUARDS)

    return [f"{path.name}:{node.lineno} {name!r}" for name, node in _uses(tree) if not is_guarded(node.lineno)]


def test_a_name_that_macos_lacks_is_asked_for_before_it_is_used(checkout: Path) -> None:
    files = [path for package in ("fairseq_alma", "data_prep") for path in (checkout / package).rglob("*.py")]
    assert len(files) > 80
    assert [use for path in files if path.name != "helper.py" for use in _unguarded(path)] == []


def test_except_on_linux_a_process_begins_without_being_told_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is None
    assert start_process([sys.executable, "-c", ""]).wait() == 0


def test_windows_is_refused_in_one_line(checkout: Path) -> None:
    code = "import sys; sys.platform = 'win32'; import fairseq_alma"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=checkout)
    assert ended.returncode == 1 and "Windows Subsystem for Linux" in ended.stderr.splitlines()[-1]
