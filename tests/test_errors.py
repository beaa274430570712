"""`AlmaError` is a ``ValueError`` for code, and one line with status 1 for whoever runs a command."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError, in_one_line, printable

RAISE = r"from fairseq_alma import errors; raise errors.AlmaError('--wait 0: a stage\n needs 1;  give --wait 1')"


def test_it_is_a_value_error_of_one_line_that_crosses_from_a_worker_process_unchanged() -> None:
    error = pickle.loads(pickle.dumps(AlmaError("\x1b[2J.txt:\n  is   empty;\n\tgive text\n")))
    assert isinstance(error, AlmaError) and isinstance(error, ValueError)
    assert str(error) == r"\x1b[2J.txt: is empty; give text"


def test_uncaught_it_is_one_line_on_standard_error_and_status_1() -> None:
    ended = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "--wait 0: a stage needs 1; give --wait 1\n"


def test_a_folder_that_cannot_be_replaced_is_named(tmp_path: Path) -> None:
    for name in ("new", "export"):
        (tmp_path / name / "in").mkdir(parents=True)
    with pytest.raises(AlmaError, match="export: Directory not empty; check the path"), in_one_line():
        (tmp_path / "new").rename(tmp_path / "export")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("runs/ä 漢　字", "runs/ä 漢　字"),
        ("a\x1b[2Jb\x07", r"a\x1b[2Jb\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\nc", r"a\rb\nc"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("not-utf8-\udcff", r"not-utf8-\udcff"),
    ],
)
def test_what_would_steer_a_terminal_is_spelled_out(name: str, shown: str) -> None:
    assert printable(name) == printable(shown) == shown
