"""Worker processes that apply one function to a sequence of tasks and give the results back in order.

Beside ``multiprocessing.Pool``: a bounded number of tasks is in memory, a worker that gets killed is noticed, and no
worker survives the main process, not even when that is killed.
"""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Generator, Iterable, Iterator, TypeVar, cast

from fairseq_alma.errors import AlmaError

Task = TypeVar("Task")
Result = TypeVar("Result")

_MAX_DEFAULT_WORKERS = 8
_WINDOW = 4  # results per worker that may wait for an earlier one


def default_workers() -> int:
    """Return the number of cores that this process may use, but no more than keep the memory below 1 GB."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_cores, _MAX_DEFAULT_WORKERS)


def ordered_map(function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int) -> Iterator[Result]:
    """Yield ``function(task)`` for each task, in the order of the tasks.

    Args:
        function: can be pickled; it is sent to each worker once.
        tasks: consumed only a few ahead of the results.
        num_workers: processes; with 1 everything happens in this one.

    Raises:
        AlmaError: a worker was killed. Whatever ``function`` raises is raised here.
    """
    if num_workers == 1:
        yield from map(function, tasks)
    else:
        yield from _map_in_processes(function, tasks, num_workers)


def run_apart(function: Callable[[Task], Result], task: Task) -> Result:
    """Return ``function(task)`` from a process of its own, whose memory is given back when it ends."""
    results = _map_in_processes(function, [task], 1)
    try:
        return next(results)
    finally:
        results.close()


def _map_in_processes(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int
) -> Generator[Result, None, None]:
    context = multiprocessing.get_context("spawn")  # forking would copy the threads of tokenizers half
    workers: dict[Connection, Any] = {}
    # Now, because it lets go of the signals that are held back below when it is started.
    resource_tracker.ensure_running()
    try:
        for _ in range(num_workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(function, there))
            # Ctrl-C and the end of a terminal are the main process's to answer, from the first moment on: a new
            # process inherits which signals are held back.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
            try:
                process.start()
                workers[here] = process
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()
        yield from _exchange(workers, iter(tasks))
    finally:
        for connection, process in workers.items():
            connection.close()
            process.join(timeout=1)
            if process.is_alive():
                process.terminate()
                process.join()


def _exchange(workers: dict[Connection, Any], tasks: Iterator[Any]) -> Iterator[Any]:
    """Keep each worker busy with one task, and the results in order."""
    idle = list(workers)
    busy: dict[Connection, int] = {}
    results: deque[list[Any]] = deque()  # one cell per task in work or waiting, empty until its result is there
    first = sent = 0
    exhausted = False
    while True:
        while idle and not exhausted and len(results) < _WINDOW * len(workers):
            try:
                task = next(tasks)
            except StopIteration:
                exhausted = True
                break
            connection = idle.pop()
            _send(connection, task, workers[connection])
            busy[connection] = sent
            results.append([])
            sent += 1
        if results and results[0]:
            first += 1
            yield results.popleft()[0]
            continue
        if not busy:
            return
        for connection in cast(list[Connection], wait(list(busy))):
            results[busy.pop(connection) - first].append(_receive(connection, workers[connection]))
            idle.append(connection)


def _send(connection: Connection, task: Any, process: Any) -> None:
    try:
        connection.send(task)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _killed(process) from error


def _receive(connection: Connection, process: Any) -> Any:
    try:
        succeeded, result = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _killed(process) from error
    if not succeeded:
        raise result
    return result


def _killed(process: Any) -> AlmaError:
    process.join(timeout=5)
    return AlmaError(
        f"--workers: a worker process ended by itself (exit status {process.exitcode}), most likely out of "
        "memory; give the command again with fewer --workers"
    )


def _work(function: Callable[[Any], Any], connection: Connection) -> None:
    """Serve one worker's tasks until the main process closes the connection or ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(task))
        except BaseException as error:
            error.add_note("".join(traceback.format_exception(error)))
            answer = (False, error)
        try:
            connection.send(answer)
        except OSError:
            return
