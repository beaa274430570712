import itertools

import pytest

from fairseq_alma.report.read_run import experiments, load_run
from tests.report.fakes import write_run


@pytest.fixture
def runs(tmp_path):
    """Write runs and read them: ``runs({"learner": "ens"}, …)``."""
    numbers = itertools.count()
    return lambda *options: [load_run(write_run(tmp_path / str(next(numbers)), **each)) for each in options]


@pytest.fixture
def groups(runs):
    return lambda *options: experiments(runs(*options))
