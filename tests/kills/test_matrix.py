"""A sample of the kill matrix; all of it is ``python -m tests.kills.matrix``, also with ``--how power``."""

import subprocess
import sys

import pytest

from tests.kills.learners import LEARNERS

IMAGES = [str(learner) for learner in LEARNERS if learner.kind == "images"]


@pytest.mark.parametrize(
    ("options", "num_kills"),
    [
        (["--learner", *IMAGES, "--sample", "2"], 20),
        (["--learner", "text-sm", "text-carried", "text-best", "--step", "47", "79", "--how", "power"], 6),
    ],
)
def test_runs_that_are_killed_at_an_operation_end_as_if_they_were_not(options, num_kills):
    matrix = [sys.executable, "-W", "ignore", "-m", "tests.kills.matrix", *options]
    done = subprocess.run(matrix, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[-2:] == [str(num_kills), "0"]
