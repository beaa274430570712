"""Runs for the tests of figures, and the look that figures are drawn with."""

from importlib.util import find_spec

import pytest

from fairseq_alma.report.read_run import read_run
from tests.report.fakes import image_stream, write_run

# Figures need the extra [report]; without it there is nothing here that could be tested.
collect_ignore_glob = [] if find_spec("matplotlib") else ["test_*.py"]


@pytest.fixture
def make(tmp_path):
    """Writes a run and reads it: ``make("name", values, learner="ens")``."""
    return lambda name, *values, **options: read_run(write_run(tmp_path / name, *values, **options))


@pytest.fixture
def styled():
    """Lets a test draw with the look of all figures."""
    from fairseq_alma.report.figures.style import applied

    with applied():
        yield


@pytest.fixture
def make_sized(make):
    """Make a run on images by its learner, the width of its backbone and its waiting time."""

    def make_one(learner, width, wait):
        options = {"--arch": "alma_mlp", "--width": str(width)}
        return make(
            f"{learner}-{width}-{wait}", learner=learner, wait=wait, num_params=[width], stream=image_stream(20),
            train_options=options,
        )  # fmt: skip

    return make_one
