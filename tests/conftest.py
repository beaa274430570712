"""Fixtures of all tests; tests marked ``gpu`` are skipped without a GPU."""

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator

import pytest

from tests.engine import fork_commands_from_here

# The tests' models are tiny: one thread computes them fastest, and threads that wait for each other on a busy machine
# are many times slower. Before torch is imported, and for the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, nohup with SIGHUP, and children inherit that; the tests send both
# to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CHECKOUT = Path(__file__).parent.parent
VISIBLE = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")}
FIRST = ("test_pages", "cli", "processes", "kills", "text", "training", "recipes", "runs")
"""The slowest tests, which run first so that they do not end alone."""


@pytest.fixture(autouse=True, scope="session")
def cheap_engine() -> Iterator[None]:
    """Fork the commands of a stage from this process."""
    with pytest.MonkeyPatch.context() as patch:
        fork_commands_from_here(patch)
        yield


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Folder, stream and checkpoint of a small language model."""
    from tests.text.stock_commands import prepare_stream, train_model  # fairseq takes seconds to import

    folder = tmp_path_factory.mktemp("trained")
    stream = prepare_stream(folder)
    checkpoint = train_model(stream, folder / "model", "--megabatch", "1", "--wait", "2")
    return SimpleNamespace(folder=folder, stream=stream, checkpoint=checkpoint)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a lock that another process holds without waiting."""
    monkeypatch.setattr("fairseq_alma.files.LOCK_PATIENCE_SECONDS", 0)


@pytest.fixture(autouse=True)
def gpus_as_they_were() -> None:
    """Restore the environment after a command with ``--cpu`` in this process."""
    for name, value in VISIBLE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Restore the logger of fairseq-eval-lm after a test."""
    logger = logging.getLogger("fairseq_cli.eval_lm")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = level, handlers, propagate
    logger.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first; skip tests marked ``gpu`` without CUDA."""
    items.sort(key=_turn)
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch  # here, because it takes seconds that most selections of tests need not pay

    if torch.cuda.is_available():
        return
    for item in for_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turn(item: pytest.Item) -> int:
    place = item.path.relative_to(CHECKOUT / "tests").as_posix()
    return next((turn for turn, first in enumerate(FIRST) if place.startswith(first)), len(FIRST))
