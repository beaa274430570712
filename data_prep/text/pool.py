"""Worker processes that apply functions to sequences of tasks and give the results back in order.

Beside ``multiprocessing.Pool``: a bounded number of tasks is in memory, a worker that gets killed is noticed, a task
can say how far it is, and no worker survives the main process, not even when that is killed.
"""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import GeneratorType
from typing import Any, Callable, Generator, Iterable, Iterator, Optional, TypeVar, Union, cast

from fairseq_alma.errors import AlmaError

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = tuple[int, int]
"""What a task has done since it said so last: bytes of input files, and words in them."""
Work = Union[Callable[[Task], Result], Callable[[Task], Generator[Progress, None, Result]]]

_WINDOW = 4  # results per worker that may wait for an earlier one
_PROGRESS, _RESULT, _ERROR = range(3)


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that stay for several sequences of tasks; they begin with the first one.

    Args:
        number: of processes; with 1 everything happens in this one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._processes: dict[Connection, Any] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def map(
        self, function: Work, tasks: Iterable[Task], report: Optional[Callable[[Progress], None]] = None
    ) -> Iterator[Any]:
        """Yield ``function(task)`` for each task, in the order of the tasks.

        Args:
            function: can be pickled; it is sent to each worker once. If it is a generator, what it yields is told to
                ``report``, and what it returns is the result.
            tasks: consumed only a few ahead of the results.
            report: is told how far tasks are.

        Raises:
            AlmaError: a worker was killed. Whatever ``function`` raises is raised here.
        """
        report = report or _ignore
        if self.number == 1:
            for task in tasks:
                yield _carry_out(function, task, report)
        else:
            yield from self._exchange(function, tasks, report)

    def run(self, function: Work, task: Task, report: Optional[Callable[[Progress], None]] = None) -> Any:
        """Return the result of a single task."""
        (result,) = self.map(function, [task], report)
        return result

    def run_apart(self, function: Work, task: Task) -> Any:
        """Return the result of a task that takes much memory, which is given back by its process when it ends."""
        if self.number == 1:
            return _carry_out(function, task, _ignore)
        apart = Workers(1)
        try:
            apart._start()
            (result,) = apart._exchange(function, [task], _ignore)
            return result
        finally:
            apart._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # forking would copy the threads of tokenizers half
        # Now, because it lets go of the signals that are held back below when it is started.
        resource_tracker.ensure_running()
        for _ in range(self.number):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,))
            # Ctrl-C and the end of a terminal are the main process's to answer, from the first moment on: a new
            # process inherits which signals are held back.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
            try:
                process.start()
                self._processes[here] = process
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()

    def _stop(self) -> None:
        for connection in self._processes:
            connection.close()
        for process in self._processes.values():
            process.join(timeout=1)
            if process.is_alive():
                process.terminate()
                process.join()
        self._processes = {}

    def _exchange(
        self, function: Work, tasks: Iterable[Task], report: Callable[[Progress], None]
    ) -> Generator[Any, None, None]:
        """Keep each worker busy with one task, and the results in order."""
        idle: list[Connection] = []
        busy: dict[Connection, int] = {}
        results: deque[list[Any]] = deque()  # one cell per task in work or waiting, empty until its result is there
        coming = iter(tasks)
        first = sent = 0
        is_done = exhausted = False
        try:
            if not self._processes:
                self._start()
            for connection in self._processes:
                self._send(connection, function)
                idle.append(connection)
            while not is_done:
                while idle and not exhausted and len(results) < _WINDOW * self.number:
                    try:
                        task = next(coming)
                    except StopIteration:
                        exhausted = True
                        break
                    connection = idle.pop()
                    self._send(connection, (task,))
                    busy[connection] = sent
                    results.append([])
                    sent += 1
                if results and results[0]:
                    first += 1
                    yield results.popleft()[0]
                    continue
                is_done = not busy
                for connection in cast(list[Connection], wait(list(busy))) if busy else ():
                    kind, content = self._receive(connection)
                    if kind == _PROGRESS:
                        report(content)
                        continue
                    results[busy.pop(connection) - first].append(content)
                    idle.append(connection)
        finally:
            if not is_done:
                self._stop()  # what they are at is of no use any more

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _killed(self._processes[connection]) from error

    def _receive(self, connection: Connection) -> tuple[int, Any]:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise _killed(self._processes[connection]) from error
        if kind == _ERROR:
            raise content
        return kind, content


def _ignore(progress: Progress) -> None:
    pass


def _carry_out(function: Work, task: Any, report: Callable[[Progress], None]) -> Any:
    result = function(task)
    if not isinstance(result, GeneratorType):
        return result
    while True:
        try:
            report(next(result))
        except StopIteration as end:
            return end.value


def _killed(process: Any) -> AlmaError:
    process.join(timeout=5)
    return AlmaError(
        f"--workers: a worker process ended by itself (exit status {process.exitcode}), most likely out of "
        "memory; give the command again with fewer --workers"
    )


def _work(connection: Connection) -> None:
    """Serve one worker's tasks until the main process closes the connection or ends; a function comes before them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    function: Any = None
    while True:
        try:
            message = connection.recv()
            if not isinstance(message, tuple):
                function = message
                continue
            try:
                answer = _RESULT, _carry_out(function, message[0], lambda done: connection.send((_PROGRESS, done)))
            except BaseException as error:
                error.add_note("".join(traceback.format_exception(error)))
                answer = _ERROR, error
            connection.send(answer)
        except (EOFError, OSError):
            return
