"""Processes forked from this one, where all modules are imported, which saves minutes."""

import contextlib
import io
import multiprocessing
import os
import pickle
import time
import traceback
from pathlib import Path

FORK = multiprocessing.get_context("fork")
PATIENCE = 600.0
"""Longest wait of a test, in seconds, on the slowest machine."""


def start(num_processes, function, *arguments):
    """Start ``function(rank, *arguments)`` in processes. Return the processes and the pipes of their results."""
    running = []
    for rank in range(num_processes):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(there, function, rank, *arguments))
        process.start()
        there.close()
        running.append((process, here))
    return running


def together(num_processes, function, *arguments):
    """Return ``function(rank, *arguments)`` of each rank, and the output of rank 0."""
    running = start(num_processes, function, *arguments)
    try:
        answers = []
        for _, here in running:
            assert here.poll(PATIENCE), "a process does not answer"
            answers.append(here.recv())
    finally:
        for process, _ in running:
            process.join(5)
            process.kill()
    failures = [failure for _, _, failure in answers if failure is not None]
    assert not failures, "\n".join(failures)
    return [result for result, _, _ in answers], answers[0][1]


def group_options(num_processes, rank, folder):
    """Return the options of a stock command for one of several processes; a file needs no free port."""
    options = ["--distributed-world-size", str(num_processes), "--distributed-rank", str(rank)]
    return [*options, "--distributed-no-spawn", "--distributed-init-method", f"file://{folder}/group-{num_processes}"]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _run(there, function, rank, *arguments):
    printed, result, failure = io.StringIO(), None, None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            result = function(rank, *arguments)
            pickle.dumps(result)
        except BaseException:
            failure = traceback.format_exc()
    there.send((result, printed.getvalue(), failure))
    os._exit(0)
