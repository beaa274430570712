"""The workers: results in order, faults passed on, nobody left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from data_prep.text.pool import ordered_map, run_apart
from fairseq_alma.errors import AlmaError


def slow_square(number: int) -> int:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number


def fail_at_five(number: int) -> int:
    if number == 5:
        raise AlmaError("number: 5 found")
    return number


def die_at_five(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(num_workers):
    assert list(ordered_map(slow_square, range(40), num_workers)) == [number**2 for number in range(40)]


def test_tasks_are_taken_only_a_few_ahead():
    taken = []
    results = ordered_map(slow_square, (taken.append(number) or number for number in range(1000)), 2)
    next(results)
    assert len(taken) < 20
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fault_in_a_worker_is_raised_here(num_workers):
    with pytest.raises(AlmaError, match="number: 5 found"):
        list(ordered_map(fail_at_five, range(40), num_workers))
    assert not multiprocessing.active_children()


def test_worker_that_is_killed_is_noticed():
    with pytest.raises(AlmaError, match=r"a worker process ended by itself \(exit status -9\)"):
        list(ordered_map(die_at_five, range(40), 2))
    assert not multiprocessing.active_children()


def test_large_tasks_and_results_do_not_block_each_other():
    tasks = [b"x" * 3_000_000] * 8
    assert list(ordered_map(bytes.upper, tasks, 2)) == [b"X" * 3_000_000] * 8


def square_in_processes_of_its_own(number: int) -> tuple[int, list[int]]:
    return os.getpid(), list(ordered_map(slow_square, range(number), 2))


def test_process_apart_may_have_workers_of_its_own():
    process, squares = run_apart(square_in_processes_of_its_own, 5)
    assert process != os.getpid()
    assert squares == [0, 1, 4, 9, 16]
    assert not multiprocessing.active_children()


def holds_interruptions_back(number: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_is_the_main_processs_to_answer_from_the_first_worker_on():
    code = (
        "from data_prep.text.pool import ordered_map\n"
        "from tests.data_prep.test_pool import holds_interruptions_back\n"
        "print(list(ordered_map(holds_interruptions_back, range(20), 2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[True] * 20}\n"
