"""A user's code, given by ``--learners-from`` and ``--features-from``: import by path, and errors by line."""

import re
import sys

import pytest

from fairseq_alma import errors
from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import command
from fairseq_alma.training.feature import import_from


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Remove modules and paths that a test has imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(errors, "USER_CODE", [])
    monkeypatch.setattr("fairseq_alma.training.feature.USER_CODE", errors.USER_CODE)
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        del sys.modules[name]


def stream(*words: object) -> int | None:
    return main(["--stream", "S", "--run", "R", *map(str, words)])


@pytest.mark.parametrize("name", ["queue.py", "a.b.py", "folder/__init__.py"])
def test_a_file_is_imported_independent_of_its_name(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "neighbour.py").write_text("IS_IMPORTED = True")
    file.write_text("import sys, queue\nfrom neighbour import IS_IMPORTED\nsys.given = (IS_IMPORTED, queue.Queue)")
    for _ in range(2):
        import_from(file.parent if name.startswith("folder") else file)
    import queue

    assert sys.__dict__.pop("given") == (True, queue.Queue)


@pytest.mark.parametrize("option", ["--learners-from", "--features-from"])
def test_a_file_of_another_type_is_rejected(option, tmp_path):
    (tmp_path / "given").write_text("text")
    with pytest.raises(AlmaError, match="given: no Python code found; give a file X"):
        stream(option, tmp_path / "given")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("a = 1\nb = a / 0", "line 2: ZeroDivisionError: division by zero; "),
        ("a = (\n", "line 1: SyntaxError: '(' was never closed"),
    ],
)
def test_an_import_error_names_file_and_line(code, message, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(AlmaError, match=re.escape(f"mine.py, {message}")):
        stream("--learners-from", tmp_path / "mine.py")


def test_a_later_error_names_file_and_line(tmp_path):
    (tmp_path / "mine.py").write_text("def plan():\n    return {}[3]")
    module = import_from(tmp_path / "mine.py")
    with pytest.raises(AlmaError, match=r"mine\.py, line 2: KeyError: 3; "):
        command(lambda argv: module.plan())([])
