"""Killed at any moment, the same command resumes to the same bits; all of it is ``python -m tests.kills.matrix``."""

import pytest

from tests.forked import together
from tests.kills.learners import RUNS
from tests.kills.matrix import main


@pytest.mark.parametrize("how", ["kill", pytest.param("power", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_every_ninth_operation_ends_as_if_it_was_not(name, how):
    (status,), printed = together(1, lambda rank: main(["--run", name, "--every", "9", "--how", how]))
    assert status == 0, printed
    *_, kills, deviations = printed.splitlines()[-1].split()
    assert int(kills) >= 5 and deviations == "0"
