"""`AlmaError` is a ``ValueError`` for code, and one line with status 1 for whoever runs a command."""

import pickle
import subprocess
import sys

import pytest

from fairseq_alma.errors import AlmaError

RAISE = (
    "from fairseq_alma.errors import AlmaError\nraise AlmaError('--wait 0: a stage\\n needs 1 or more;  give --wait 1')"
)


def test_code_catches_it_as_a_value_error() -> None:
    with pytest.raises(ValueError, match="--wait 0"):
        raise AlmaError("--wait 0: give 1 or more")


def test_uncaught_it_is_one_line_on_standard_error_and_status_1() -> None:
    ended = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == "--wait 0: a stage needs 1 or more; give --wait 1\n"


def test_its_text_is_one_line_without_repeated_blanks() -> None:
    assert str(AlmaError("a.txt:\n  is   empty;\n\tgive text\n")) == "a.txt: is empty; give text"


def test_it_crosses_from_a_worker_process_unchanged() -> None:
    error = pickle.loads(pickle.dumps(AlmaError("a.txt: is empty")))
    assert isinstance(error, AlmaError)
    assert str(error) == "a.txt: is empty"
