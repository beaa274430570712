"""Worker processes that share numbered tasks and stream their results back in the order of the tasks.

Worker w does the tasks w, w + N, w + 2N, … of N workers and sends each result as soon as it has it, so that neither a
large task nor a fast worker fills the memory. Neither ``multiprocessing.Pool`` nor ``ProcessPoolExecutor`` streams the
results of one task, and the first waits for ever when a worker is killed.
"""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Callable, Iterable, Iterator, TypeVar

from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import LiveLine, format_duration, print_line

Function = Callable[[str, int], Iterator[Any]]
"""Takes the work folder and the number of a task, and yields results."""
_RESULT, _END, _ERROR = range(3)
T = TypeVar("T")
_BUFFERED_RESULTS = 32  # of a worker, each of about one MiB of text


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Function, folder: str, num_tasks: int, num_workers: int) -> Iterator[Any]:
    """Yield the results of all tasks, in the order of their numbers whatever the number of workers.

    Raises:
        AlmaError: a worker was killed. Whatever ``function`` raises is raised here.
    """
    num_workers = min(num_workers, num_tasks)
    if num_workers < 2:
        for number in range(num_tasks):
            yield from function(folder, number)
        return
    started: list[tuple[Any, Connection]] = []
    try:
        for worker in range(num_workers):
            started.append(_start(function, folder, range(worker, num_tasks, num_workers)))
        for number in range(num_tasks):
            yield from _results(started[number % num_workers][1])
    finally:
        for process, _ in started:
            process.terminate()
        for process, connection in started:
            process.join()
            connection.close()


def _start(function: Function, folder: str, numbers: range) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of tokenizers in an unknown state
    connection, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, function, folder, numbers), daemon=True)
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"  # it imports nothing from the working folder
    try:
        process.start()
    finally:
        os.environ["PYTHONSAFEPATH"] = before
        theirs.close()
    return process, connection


def _results(connection: Connection) -> Iterator[Any]:
    """Yield the results of one task."""
    while True:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise AlmaError(
                "--workers: a worker process was killed, most likely out of memory; give the command again with fewer "
                "--workers"
            ) from error
        if kind == _END:
            return
        if kind == _ERROR:
            raise content
        yield content


def _work(connection: Connection, function: Function, folder: str, numbers: range) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process answers Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    results: queue.Queue[Any] = queue.Queue(_BUFFERED_RESULTS)
    sender = threading.Thread(target=_send, args=(connection, results))
    sender.start()
    try:
        for number in numbers:
            for result in function(folder, number):
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
            os._exit(1)  # nobody reads any more


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def with_progress(items: Iterable[T], title: str, total: int, num_bytes: Callable[[T], int]) -> Iterator[T]:
    """Yield the results of a step, which reads ``total`` bytes, and show its share, MB per second and the time left."""
    line, start, done = LiveLine(), time.monotonic(), 0
    line.is_due()  # nothing is known yet
    try:
        for item in items:
            yield item
            done += num_bytes(item)
            if line.is_due():
                share, seconds = min(done / max(total, 1), 1.0), max(time.monotonic() - start, 1e-9)
                left = format_duration(seconds / max(share, 1e-9) * (1 - share))
                line.show(f"{title}: {share:.0%}, {done / 1e6 / seconds:,.1f} MB/s, {left} left")
    finally:
        line.clear()
    print_line(f"{title}: {total / 1e6:,.1f} MB, {time.monotonic() - start:.1f} s", sys.stderr)
