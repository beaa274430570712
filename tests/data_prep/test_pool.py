"""The workers: results in order, faults passed on, nobody left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from data_prep.text.pool import Workers
from fairseq_alma.errors import AlmaError


def slow_square(number: int) -> int:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number


def fail_at_five(number: int) -> int:
    if number == 5:
        raise AlmaError("number: 5 found")
    return number


def cube(number: int) -> int:
    return number**3


def count_up(number: int):
    for done in range(number):
        yield done, number
    return number**2


def die_at_five(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(num_workers):
    with Workers(num_workers) as workers:
        for function, power in ((slow_square, 2), (cube, 3)):
            assert list(workers.map(function, range(40))) == [number**power for number in range(40)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_task_says_how_far_it_is(num_workers):
    said = []
    with Workers(num_workers) as workers:
        assert list(workers.map(count_up, [3, 1, 2], said.append)) == [9, 1, 4]
    assert sorted(said) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_tasks_are_taken_only_a_few_ahead():
    taken = []
    results = Workers(2).map(slow_square, (taken.append(number) or number for number in range(1000)))
    next(results)
    assert len(taken) < 20
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fault_in_a_worker_is_raised_here(num_workers):
    with pytest.raises(AlmaError, match="number: 5 found"):
        list(Workers(num_workers).map(fail_at_five, range(40)))
    assert not multiprocessing.active_children()


def test_worker_that_is_killed_is_noticed():
    with pytest.raises(AlmaError, match=r"a worker process ended by itself \(exit status -9\)"):
        list(Workers(2).map(die_at_five, range(40)))
    assert not multiprocessing.active_children()


def test_large_tasks_and_results_do_not_block_each_other():
    tasks = [b"x" * 3_000_000] * 8
    with Workers(2) as workers:
        assert list(workers.map(bytes.upper, tasks)) == [b"X" * 3_000_000] * 8


def process_of(number: int) -> tuple[int, int]:
    return os.getpid(), number


def test_a_task_apart_has_a_process_that_ends_with_it():
    with Workers(2) as workers:
        process, number = workers.run_apart(process_of, 5)
        assert number == 5 and process not in {each for each, _ in workers.map(process_of, range(8))} | {os.getpid()}
    assert not multiprocessing.active_children()


def holds_interruptions_back(number: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_is_the_main_processs_to_answer_from_the_first_worker_on():
    code = (
        "from data_prep.text.pool import Workers\n"
        "from tests.data_prep.test_pool import holds_interruptions_back\n"
        "print(list(Workers(2).map(holds_interruptions_back, range(20))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[True] * 20}\n"
