import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from data_prep.text.command import in_order
from fairseq_alma.errors import AlmaError
from tests.forked import wait_until


def count_up(number: int):
    for each in range(number):
        time.sleep(0.01 if number % 3 == 0 else 0)
        yield f"{number}-{each}"


def fail_at_five(number: int):
    if number == 5:
        raise AlmaError("number: 5 found")
    yield number


def die_at_five(number: int):
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    yield number


def wait_forever(number: int):
    open(f"pid-{os.getpid()}", "w").close()
    time.sleep(1000)
    yield number


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_are_in_the_order_of_the_tasks(num_workers):
    assert [*in_order(count_up, 9, num_workers)] == [f"{n}-{each}" for n in range(9) for each in range(n)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("function", "message"), [(fail_at_five, "number: 5 found"), (die_at_five, "was killed")])
def test_an_error_or_a_kill_of_a_worker_ends_the_others(function, message):
    with pytest.raises(AlmaError, match=message):
        list(in_order(function, 100, 2))
    assert not multiprocessing.active_children()


def test_workers_end_with_a_main_process_that_is_killed(tmp_path, checkout):
    program = "from tests.data_prep.text.test_workers import *; [*in_order(wait_forever, 2, 2)]"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    assert wait_until(lambda: len([*tmp_path.glob("pid-*")]) == 2)
    process.kill()
    process.wait()
    pids = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
