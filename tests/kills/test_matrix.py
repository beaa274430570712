"""A sample of the kill matrix; all of it is ``python -m tests.kills.matrix``, also with ``--how power``.

Every learner, option of a training and way to share it out is killed and resumed here, so no other test does it again.
"""

import pytest

from tests.forked import together
from tests.kills.learners import LEARNERS
from tests.kills.matrix import main
from tests.kills.tools import ALL_TOOLS

IMAGES = [str(learner) for learner in LEARNERS if learner.kind == "images"]
ALIKE = ("images-bagging", "images-alone", "images-ens", "images-moe", "images-seeds")  # others like them are there
SOME = [name for name in IMAGES if name not in ALIKE]
TEXT = [str(learner) for learner in LEARNERS if learner.kind == "text"]
TOOLS = [str(tool) for tool in ALL_TOOLS if not tool.is_resumed]


@pytest.mark.parametrize(
    ("options", "num_kills"),
    [
        (["--learner", *SOME[:2], "--sample", "1", "--how", "power"], 2),
        pytest.param(["--learner", *SOME, "--sample", "1", "--how", "power"], len(SOME), marks=pytest.mark.slow),
        (["--learner", "alma-export", "--step", "12"], 1),
        (["--learner", "alma-grow", "--step", "6", "--how", "meet"], 1),
        (["--learner", "images-sm", "--step", "12", "--how", "meet"], 1),
        pytest.param(["--learner", "text-carried", "--step", "79", "--how", "power"], 1, marks=pytest.mark.slow),
        pytest.param(["--learner", *TOOLS, "--sample", "4", "--how", "power"], 4 * len(TOOLS), marks=pytest.mark.slow),
        pytest.param(["--learner", *TOOLS, "--sample", "4", "--how", "meet"], 4 * len(TOOLS), marks=pytest.mark.slow),
        pytest.param(["--learner", "alma-update-again", "--sample", "2"], 2, marks=pytest.mark.slow),
        pytest.param(["--learner", "images-gmoe", "--sample", "4", "--how", "clock"], 4, marks=pytest.mark.slow),
        pytest.param(["--learner", *IMAGES, "--sample", "2"], 2 * len(IMAGES), marks=pytest.mark.slow),
        pytest.param(["--learner", *TEXT, "--sample", "1"], len(TEXT), marks=pytest.mark.slow),
        pytest.param(
            ["--learner", "text-sm", "text-best", "--step", "47", "79", "--how", "power"], 4, marks=pytest.mark.slow
        ),
    ],
)
def test_runs_that_are_killed_at_an_operation_end_as_if_they_were_not(options, num_kills):
    (status,), printed = together(1, lambda rank: main(options))
    assert status == 0, printed
    assert printed.splitlines()[-1].split()[-2:] == [str(num_kills), "0"]
