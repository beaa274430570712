"""Run numbered tasks in worker processes, and yield the results in the order of the tasks.

Worker w of N runs the tasks w, w + N, w + 2N and so on. A worker sends each result separately, and waits while
`_BUFFERED_RESULTS` results are unread. So neither a large task nor a fast worker fills the memory. With
``ProcessPoolExecutor``, a worker would send all results of a task together.
"""

import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any, Callable, Iterator

from fairseq_alma.errors import AlmaError

Function = Callable[[int], Iterator[Any]]
"""Function that takes a task number and yields the results of the task."""
_RESULT, _END, _ERROR = range(3)
_BUFFERED_RESULTS = 32  # maximum number of unread results of a worker; each result is for about one MiB of text


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Function, num_tasks: int, num_workers: int) -> Iterator[Any]:
    """Yield the results of all tasks in the order of the task numbers, and re-raise exceptions of ``function``.

    Raises:
        AlmaError: a worker was killed.
    """
    num_workers = min(num_workers, num_tasks)
    if num_workers < 2:
        for number in range(num_tasks):
            yield from function(number)
        return
    context = multiprocessing.get_context("spawn")  # Fork is unsafe while tokenizers runs threads.
    started: list[tuple[Any, Connection]] = []
    before = os.environ.get("PYTHONSAFEPATH", "")
    try:
        os.environ["PYTHONSAFEPATH"] = "1"  # Workers must not import modules from the current directory.
        for worker in range(num_workers):
            connection, sender = context.Pipe(duplex=False)
            numbers = range(worker, num_tasks, num_workers)
            process = context.Process(target=_work, args=(sender, function, numbers), daemon=True)
            process.start()
            sender.close()
            started.append((process, connection))
        os.environ["PYTHONSAFEPATH"] = before
        for number in range(num_tasks):
            yield from _results(started[number % num_workers][1])
    finally:
        os.environ["PYTHONSAFEPATH"] = before
        for process, _ in started:
            process.terminate()
        for process, connection in started:
            process.join()
            connection.close()


def _results(connection: Connection) -> Iterator[Any]:
    """Receive and yield the results of one task. Raises AlmaError if the worker was killed."""
    while True:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise AlmaError(
                "--workers: a worker process was killed, possibly out of memory; run the command again with fewer "
                "--workers"
            ) from error
        if kind == _END:
            return
        if kind == _ERROR:
            raise content
        yield content


def _work(connection: Connection, function: Function, numbers: range) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process handles Ctrl-C.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    results: queue.Queue[Any] = queue.Queue(_BUFFERED_RESULTS)
    sender = threading.Thread(target=_send, args=(connection, results))
    sender.start()
    try:
        for number in numbers:
            for result in function(number):
                results.put((_RESULT, result))
            results.put((_END, None))
    except BaseException as error:
        results.put((_ERROR, error))
    results.put(None)
    sender.join()


def _send(connection: Connection, results: queue.Queue) -> None:
    while (message := results.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            os._exit(1)  # The main process has exited.


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
