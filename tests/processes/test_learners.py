"""One learner that grows, with two processes; ``python -m tests.processes.learners`` tries all of them."""

import subprocess
import sys

from tests.processes.learners import differences


def test_a_learner_that_grows_and_loses_processes_ends_with_the_figures_of_one_process():
    command = [sys.executable, "-W", "ignore", "-m", "tests.processes.learners", "--learner", "gmoe-split"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gmoe-split   processes 2, 2, 1: perplexity" in done.stdout


def test_what_differs_between_runs_is_named():
    record = {"stage": 0, "wall_seconds": 1.0, "num_updates": 5, "test": {"loss": 2.0, "ppl": 4.0}}
    near = {**record, "wall_seconds": 9.0, "test": {"loss": 2.0001, "ppl": 4.0}}
    assert list(differences([record], [near])) == []
    far = {**record, "num_updates": 6, "test": {"loss": 2.1, "ppl": 4.0}}
    assert len(list(differences([record], [far]))) == 2
    assert list(differences([record], [])) == ["0 stages, not 1"]
