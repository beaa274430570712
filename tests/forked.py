"""Several processes that work together, forked from the one that has imported everything: seconds, not minutes."""

import contextlib
import io
import multiprocessing
import os
import pickle
import traceback

FORK = multiprocessing.get_context("fork")


def start(num_processes, function, *arguments):
    """Start ``function(rank, *arguments)`` in processes. Returns the processes, and where their results arrive."""
    running = []
    for rank in range(num_processes):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(there, function, rank, *arguments))
        process.start()
        there.close()
        running.append((process, here))
    return running


def together(num_processes, function, *arguments, seconds=100):
    """Return ``function(rank, *arguments)`` of each rank, and what rank 0 printed."""
    running = start(num_processes, function, *arguments)
    try:
        answers = []
        for _, here in running:
            assert here.poll(seconds), "a process does not answer"
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
