"""Run each fairseq or alma command in a child of a helper process, which imports fairseq and torch only once.

The imports take seconds, longer than a stage of a small model. A process can fork safely only if it has no threads and
does not use CUDA. Therefore the helper starts no thread, runs no tensor operation and never calls CUDA; alma-stream
itself runs the tokenizers and shows progress. A child sends training metrics and the command's result through a pipe.
The helper and its children end when alma-stream ends. With ``--dry-run``, alma-stream only prints the commands.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import fairseq_alma
from fairseq_alma.errors import AlmaError, ProcessError, describe_fault
from fairseq_alma.terminal import die_with_parent, last_line, start_process

PRELOADED = (
    "fairseq_cli.train",
    "fairseq_cli.eval_lm",
    "fairseq.data.data_utils_fast",
    "fairseq.data.token_block_utils_fast",
    "fairseq.model_parallel.megatron_trainer",
    "fairseq.quantization_utils",
    "fairseq_alma.text.grow",
    "torch._dynamo",  # torch's optimizers import this module at their first step
)
_WHILE_IMPORTING = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a check for a GPU during an import must not initialize CUDA
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow would start a thread otherwise
}
MAX_REASON = 400
REPORT_SECONDS = 5.0  # Seconds to wait for the errors of other ranks after the first failure.
KILLED = "the helper process was killed, possibly out of memory; run the command again"
LINE_LENGTH = 110
# Command -> function that the command calls, as ``module:name``.
FUNCTIONS = {
    "fairseq-train": "fairseq_cli.train:cli_main",
    "fairseq-eval-lm": "fairseq_alma.text.losses:evaluate",
    "alma-grow": "fairseq_alma.cli.grow:main",
}


class Call(NamedTuple):
    """Message from alma-stream to the helper: arguments of `call` for one child process.

    Attributes:
        environment: all environment variables of the child.
        folder: working directory of the child.
        num_files: number of file descriptors that follow the message: the files to keep open, then the pipe.
    """

    function: str
    arguments: tuple[Any, ...]
    words: Sequence[str]
    log: Optional[Path]
    environment: Mapping[str, str]
    folder: str
    num_files: int


class Helper:
    """Handle that alma-stream uses to start, call and stop the helper process."""

    def __init__(self) -> None:
        self.connection, other_end = Pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the helper process has ended
        with other_end:
            # -P: a file in the working directory must not be imported in place of a library of the same name.
            main = f"from fairseq_alma.text.helper import serve; serve({other_end.fileno()})"
            environment = {**_WHILE_IMPORTING, **os.environ}  # a child gets the environment of its caller
            self.process = start_process(
                [sys.executable, "-P", "-c", main],
                env=environment,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=[other_end.fileno()],
            )
        try:
            self.connection.recv()  # sent after the imports
        except BaseException as error:
            self.close()
            if not isinstance(error, (EOFError, OSError)):
                raise
            if self.process.returncode < 0:
                raise ProcessError(KILLED) from error
            self.errors.seek(0)
            reason = last_line(self.errors.read().decode(errors="replace"))
            raise ProcessError(
                f"{sys.executable}: fairseq cannot be imported ({reason}); free memory or reinstall fairseq"
            ) from error

    def fork(self, call: Call, files: Sequence[int]) -> None:
        try:
            self.connection.send(tuple(call))
            for file in files:
                send_handle(self.connection, file, self.process.pid)
        except OSError as error:
            raise ProcessError(KILLED) from error

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_helper: Optional[Helper] = None


@atexit.register
def close() -> None:
    """End the helper process if it is running."""
    global _helper
    if _helper is not None:
        _helper.close()
    _helper = None


def call(
    function: str,
    *arguments: Any,
    words: Sequence[str] = (),
    log: Optional[Path] = None,
    environment: Mapping[str, str] = {},
    num_procs: int = 1,
    files: Sequence[int] = (),
    watch: Callable[[Mapping[str, Any]], None] = lambda figures: None,
) -> Any:
    """Call a function in a child of the helper process; start the helper if it is not running.

    Args:
        function: function to call, as ``module:name``.
        arguments: arguments of the function; arguments and return value must be picklable.
        words: `sys.argv` of the child; empty: `sys.argv` of the helper.
        log: file to which the child appends all output; None: output is discarded.
        environment: additional environment variables.
        num_procs: number of distributed processes, each with the environment variables of ``torchrun``.
        files: file descriptors that the children keep open, such as locks.
        watch: function that receives the metrics of each logged update.

    Returns:
        The return value of the function in rank 0.

    Raises:
        AlmaError: the function failed; the message names the reason and the log file.
    """
    global _helper
    if _helper is None:
        _helper = Helper()
    shared: dict[str, str] = {}
    if num_procs > 1:
        with socket.socket() as free:
            free.bind(("", 0))
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), **group_sizes(num_procs)}
    pipes = []
    try:
        for rank in map(str, range(num_procs)):
            receiver, sender = Pipe(duplex=False)
            with sender:
                ranks = {**shared, "RANK": rank, "LOCAL_RANK": rank} if shared else {}
                variables = {**os.environ, **ranks, **environment}
                request = Call(function, arguments, [*words], log, variables, os.getcwd(), 1 + len(files))
                _helper.fork(request, [*files, sender.fileno()])
            pipes.append(receiver)
        answers = _await(pipes, watch)
        failures = {rank: answer for rank, answer in answers.items() if answer[0] != "returned"}
        if len(pipes) > 1 and failures:
            close()  # ends distributed processes that wait for each other
    except BaseException:
        close()
        for receiver in pipes:  # release the locks only after the children have ended
            _await_end(receiver)
        raise
    finally:
        for receiver in pipes:
            receiver.close()
    if not failures:
        return answers[0][1]
    failed, (kind, reason) = min(failures.items(), key=lambda item: (item[1][0] != "ended", item[0]))
    if log is None:
        raise AlmaError(reason) if kind == "refused" else ProcessError(f"{function} failed ({reason})")
    if not reason:  # the argument parser has printed the reason
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            reason = last_line(file.read().decode(errors="replace"))
    reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "…"
    rank = f"rank {failed}: " if len(pipes) > 1 else ""
    raise AlmaError(f"{log}: {words[0] if words else function} failed: {rank}{reason}")


def group_sizes(num_procs: int) -> dict[str, str]:
    """Return ``torchrun`` variables that all ranks share: WORLD_SIZE, LOCAL_WORLD_SIZE and OMP_NUM_THREADS."""
    return {
        "WORLD_SIZE": str(num_procs),
        "LOCAL_WORLD_SIZE": str(num_procs),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _await(pipes: Sequence[Connection], watch: Callable[[Mapping[str, Any]], None]) -> dict[int, tuple[str, Any]]:
    """Wait for the children; return rank -> (kind, value or reason), as of `_execute`, or ("ended", reason)."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    answers: dict[int, tuple[str, Any]] = {}
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        for pipe in wait([*waiting], None if deadline == float("inf") else 0.1):
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "ended", "ended by a signal, possibly out of memory"
            if kind == "figures":
                if rank == 0:
                    watch(value)
                continue
            del waiting[pipe]
            answers[rank] = kind, value
            if kind == "returned":
                _await_end(pipe)
            else:
                deadline = min(deadline, time.monotonic() + REPORT_SECONDS)
    return answers


def _await_end(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()


def serve(file: int) -> None:
    """Run the helper: fork a child for each `Call` received through file descriptor ``file``."""
    preload()
    connection = Connection(file)
    connection.send(None)
    while True:
        try:
            request = Call(*connection.recv())
        except EOFError:
            # Only the CPU time of reaped children counts for the command, and the last child may still be exiting.
            with contextlib.suppress(ChildProcessError):
                for _ in range(50):
                    if not os.waitpid(-1, os.WNOHANG)[0]:
                        time.sleep(0.01)
            os._exit(0)
        files = [recv_handle(connection) for _ in range(request.num_files)]
        fork_child(request, files)
        for each in files:
            os.close(each)
        with contextlib.suppress(ChildProcessError):  # reap ended children
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def preload() -> None:
    """Import the modules of the commands, and replace a slow function of fairseq-train with `configuration_of`."""
    gc.disable()  # saves a tenth of the import time
    for name in PRELOADED:
        importlib.import_module(name)
    from fairseq.utils import import_user_module
    from fairseq_cli import train

    from fairseq_alma.training.stage_task import configuration_of

    train.convert_namespace_to_omegaconf = configuration_of
    import_user_module(Namespace(user_dir=str(Path(fairseq_alma.__file__).parent)))
    gc.collect()
    gc.freeze()  # keep memory pages shared: the garbage collector of a child would write to them
    gc.enable()


def fork_child(request: Call, files: Sequence[int]) -> int:
    """Fork a child that calls the requested function; return the process id of the child."""
    die = die_with_parent()
    child = os.fork()
    if child:
        return child
    try:
        if die is not None:
            die()
        atexit._clear()  # exit functions of the parent would delete the parent's temporary folders
        pipe = Connection(files[-1], readable=False)
        answer = _execute(request, pipe)
        atexit._run_exitfuncs()
        for standard in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the disk may be full
                standard.flush()
        pipe.send(answer)
    finally:  # descriptors close in ascending order, so locks are free when the pipe closes
        os._exit(0)


def _execute(request: Call, pipe: Connection) -> tuple[str, Any]:
    """Call the requested function with the requested environment variables, folder and log.

    Returns:
        ("returned", return value), ("refused", message of `sys.exit`), or ("failed", description of the error, which is
        empty after `sys.exit` with a status).
    """
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    output = os.open(request.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, open(number, "w", closefd=False, buffering=1))  # noqa: SIM115
    os.close(output)
    if request.words:
        sys.argv = [*request.words]
    layout = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=layout, datefmt="%Y-%m-%d %H:%M:%S", level=logging.INFO, stream=sys.stdout, force=True)

    def send_figures(record: logging.LogRecord) -> None:
        if record.name == "train_inner":  # the metrics of an update in JSON
            pipe.send(("figures", json.loads(record.getMessage())))

    figures = logging.Handler()
    figures.emit = send_figures  # type: ignore[method-assign]
    logging.getLogger("fairseq.logging.progress_bar").addHandler(figures)
    import torch

    try:
        if (threads := request.environment.get("OMP_NUM_THREADS", "")).isdecimal() and int(threads):
            torch.set_num_threads(int(threads))
        module, _, name = request.function.partition(":")
        return "returned", getattr(importlib.import_module(module), name)(*request.arguments)
    except SystemExit as ending:
        if ending.code in (None, 0):
            return "returned", None
        if not isinstance(ending.code, str):
            return "failed", ""
        with contextlib.suppress(OSError):
            print(ending.code, file=sys.stderr)
        return "refused", ending.code
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        known = describe_fault(error) if isinstance(error, Exception) else None
        return "failed", known or f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Command:
    """A fairseq or alma command, to print or to run.

    Attributes:
        program: name of an installed command.
        groups: arguments in groups; `__str__` prints all arguments of a group on the same line.
        environment: additional environment variables.
        num_procs: number of distributed processes, each with the environment variables of ``torchrun``.
    """

    program: str
    groups: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    num_procs: int = 1

    @property
    def arguments(self) -> list[str]:
        return [word for group in self.groups for word in group]

    def __str__(self) -> str:
        launch = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        begin, end = "", ""
        if self.num_procs > 1:
            sizes = [f"{name}={value}" for name, value in group_sizes(self.num_procs).items()]
            launch += ["MASTER_ADDR=localhost MASTER_PORT=29500", *sizes, "RANK=$RANK LOCAL_RANK=$RANK"]
            begin, end = f"for RANK in {' '.join(map(str, range(self.num_procs)))}; do ", " & done; wait"
        lines = [begin + " ".join([*launch, self.program])]
        for words in (shlex.join(group) for group in self.groups if group):
            if len(lines) > 1 and len(lines[-1]) + len(words) < LINE_LENGTH:
                lines[-1] += " " + words
            else:
                lines.append("    " + words)
        return " \\\n".join(lines) + end

    def run(
        self,
        log: Path,
        files: Sequence[int] = (),
        watch: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        given: Sequence[Any] = (),
    ) -> Any:
        """Run the command in the helper process, and return the result of its function in `FUNCTIONS`.

        Args:
            log: file to which the command line and all output are appended.
            files: file descriptors that the command keeps open.
            watch: function that receives the metrics of each logged update.
            given: arguments of the function, which the command line in the log does not contain.

        Raises:
            AlmaError: the command failed; the message names the reason and the log file.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
            print(f"$ {self}", file=file)
        return call(
            FUNCTIONS[self.program],
            *given,
            words=[self.program, *self.arguments],
            log=log,
            environment=self.environment,
            num_procs=self.num_procs,
            files=files,
            watch=watch,
        )
