"""No command, and no process that one starts, imports from the working folder: a user's files stand there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.text.stock_commands import write_text

NAMES = ("random", "torch", "queue", "token", "numpy", "fairseq", "select", "tokenizers", "yaml", "struct", "calendar")
STREAM = ["--vocab-size", "256", "--megabatches", "2", "--valid-bytes", "500", "--test-bytes", "500"]
TRAIN = ["--decoder-embed-dim", "16", "--max-update", "2", "--tokens-per-sample", "32", "--cpu"]


@pytest.fixture
def working_folder(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open('{name}-was-run', 'w').close()\nraise SystemExit('{name} ran')\n")
    write_text(tmp_path / "text.txt", num_documents=3000)
    return tmp_path


def call(folder, program, *words):
    done = subprocess.run([Path(sys.executable).with_name(program), *words], cwd=folder, capture_output=True, text=True)
    assert not [path.name for path in folder.glob("*-was-run")]
    assert done.returncode == 0, done.stderr[-2000:]


def test_workers_that_prepare_text_do_not_import_from_it(working_folder):
    call(working_folder, "alma-prep-text", "text.txt", "--out", "S", "--workers", "2", *STREAM)


@pytest.mark.slow
def test_trainings_and_tests_of_a_run_do_not_import_from_it(working_folder):
    call(working_folder, "alma-prep-text", "text.txt", "--out", "S", "--workers", "1", *STREAM)
    call(working_folder, "alma-stream", "--stream", "S", "--run", "R", "--", *TRAIN)
