"""A killed run resumes bit for bit; ``python -m tests.kills.matrix`` tests all operations."""

import pytest

from tests.forked import together
from tests.kills.matrix import main

FAST = {"images-gmoe": 36, "text-gmoe": 66}
"""Run -> N, to kill at every N-th operation in the fast suite; a kill on text takes several seconds."""
SLOW = {"images-gmoe": 12, "text-gmoe": 33, "text-ens": 33}
"""The same with losses of power, marked as slow, as are kills at every ninth operation of each run."""


@pytest.mark.parametrize(
    ("name", "every", "how"),
    [
        *((name, every, "kill") for name, every in FAST.items()),
        *(pytest.param(*each, "power", marks=pytest.mark.slow) for each in SLOW.items()),
        *(pytest.param(name, 9, "kill", marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_a_run_killed_at_every_nth_operation_resumes_bit_for_bit(name, every, how):
    (status,), printed = together(1, lambda rank: main(["--run", name, "--every", str(every), "--how", how]))
    assert status == 0, printed
    *_, kills, deviations = printed.splitlines()[-1].split()
    assert int(kills) >= 2 and deviations == "0"
