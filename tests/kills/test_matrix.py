"""Killed at any moment, the same command resumes to the same bits; all of it is ``python -m tests.kills.matrix``."""

import pytest

from tests.forked import together
from tests.kills.learners import RUNS
from tests.kills.matrix import main

FAST = {"images-gmoe": 9, "text-gmoe": 36, "text-ens": 36}
"""Kills at every N-th operation in the fast suite; a kill on text takes two launches of seconds."""


@pytest.mark.parametrize(
    ("name", "every", "how"),
    [
        *((name, every, "kill") for name, every in FAST.items()),
        *(pytest.param(name, 9, "kill", marks=pytest.mark.slow) for name in RUNS),
        *(pytest.param(name, FAST.get(name, 36), "power", marks=pytest.mark.slow) for name in RUNS),
    ],
)
def test_a_run_killed_at_every_nth_operation_ends_as_if_it_was_not(name, every, how):
    (status,), printed = together(1, lambda rank: main(["--run", name, "--every", str(every), "--how", how]))
    assert status == 0, printed
    *_, kills, deviations = printed.splitlines()[-1].split()
    assert int(kills) >= 2 and deviations == "0"
