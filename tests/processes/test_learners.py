"""One learner that grows, with two processes; ``python -m tests.processes.learners`` tries all of them."""

import pytest

from tests.forked import together
from tests.processes.learners import differences, main


@pytest.mark.slow
def test_a_learner_that_grows_and_loses_processes_ends_with_the_figures_of_one_process():
    (status,), printed = together(1, lambda rank: main(["--learner", "gmoe-split"]))
    assert status == 0, printed
    assert "gmoe-split   processes 2, 2, 1: perplexity" in printed


def test_what_differs_between_runs_is_named():
    record = {"stage": 0, "wall_seconds": 1.0, "num_updates": 5, "test": {"loss": 2.0, "ppl": 4.0}}
    near = {**record, "wall_seconds": 9.0, "test": {"loss": 2.0001, "ppl": 4.0}}
    assert list(differences([record], [near])) == []
    far = {**record, "num_updates": 6, "test": {"loss": 2.1, "ppl": 4.0}}
    assert len(list(differences([record], [far]))) == 2
    assert list(differences([record], [])) == ["0 stages, not 1"]
