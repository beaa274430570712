"""Runs a command in a process forked from this one, and the commands that it starts in processes forked from that.

All of them find fairseq imported, which is what makes thousands of launches possible. `fork_server` itself is left
out: its server would outlive an ``alma-stream`` that is killed. What it does with a command is done here in short.
"""

import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import IO, Any, Callable, Mapping, Optional, Sequence

import fairseq.dataclass.utils

from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.images import image_settings, stage_trainer
from fairseq_alma.runs import workers
from fairseq_alma.runs.workers import die_with_parent
from fairseq_alma.text import process
from tests.kills.crashes import Crash
from tests.scripts import end_with, print_to, run_here

TIMEOUT = 1800.0

# Each command would import it by itself.
PRELOADED = (
    "fairseq.data.data_utils_fast",
    "fairseq.data.token_block_utils_fast",
    "fairseq_alma.text.grow",
    "fairseq_alma.checkpoints.ensemble_file",
    "fairseq_alma.checkpoints.model_facts",
    "torch._dynamo",
    "transformers",
    "fairseq_alma.exchange.load_model",
    "fairseq_alma.exchange.image_folder",
    "fairseq_alma.exchange.import_folder",
)
Main = Callable[[Sequence[str]], Optional[int]]


def prepare(cache: Path) -> None:
    """Let commands share what takes most of a small run: to parse the same options.

    Args:
        cache: folder in which parsed options stay.
    """
    cache.mkdir(exist_ok=True)
    parse = fairseq.dataclass.utils.convert_namespace_to_omegaconf

    def parse_once(options: Namespace) -> Any:
        key = hashlib.sha256(repr(sorted(vars(options).items())).encode()).hexdigest()
        if not (cache / key).exists():
            (cache / f"{key}.new").write_bytes(pickle.dumps(parse(options)))
            (cache / f"{key}.new").rename(cache / key)
        return pickle.loads((cache / key).read_bytes())

    for module in (fairseq.dataclass.utils, image_settings):
        module.convert_namespace_to_omegaconf = parse_once


def launch(arguments: Sequence[str], log: Path, crash: Crash, main: Main = alma_stream) -> int:
    """Run a command to its end, or to where it crashes.

    Args:
        arguments: of the command.
        log: gets what it prints.
        crash: where.
        main: the command.

    Returns:
        Exit status as `subprocess.Popen.returncode` has it.
    """
    return begin(arguments, log, crash, main).wait(TIMEOUT)


def begin(arguments: Sequence[str], log: Path, crash: Crash, main: Main) -> "Forked":
    """Begin a command; see `launch`."""
    for name in PRELOADED:
        importlib.import_module(name)
    child = os.fork()
    if child == 0:
        end_with(lambda: _run_command_of_ours(arguments, log, crash, main))
    return Forked(child)


class Forked:
    """A forked process, to be used as a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                if timeout == TIMEOUT:
                    os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def _run_command_of_ours(arguments: Sequence[str], log: Path, crash: Crash, main: Main) -> Optional[int]:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    print_to(output, output)
    stage_trainer.SAVE_EVERY_SECONDS = 0.0
    process._begin = _begin
    workers.start_process = _begin_member
    crash.arm()
    try:
        return main(arguments)
    finally:
        crash.end()


def _begin(
    command: process.Command, place: Mapping[str, str], program: str, output: int, keep_open: Sequence[int]
) -> Forked:
    die = die_with_parent()
    child = os.fork()
    if child == 0:
        if die is not None:
            die()
        os.setsid()
        end_with(lambda: _run_command(command, place, program, output))
    return Forked(child)


def _begin_member(words: Sequence[str], stderr: IO[bytes], env: Mapping[str, str], **options: Any) -> Forked:
    """Begin an ``alma-stream`` for some members of a run, as ``--jobs`` does."""
    die = die_with_parent()
    child = os.fork()
    if child == 0:
        if die is not None:
            die()
        os.setsid()
        os.environ.update(env)
        print_to(os.open(os.devnull, os.O_WRONLY), stderr.fileno())
        end_with(lambda: alma_stream(words[1:]))
    return Forked(child)


def _run_command(command: process.Command, place: Mapping[str, str], program: str, output: int) -> None:
    print_to(output, output)
    run_here(program, command.arguments, {**place, **command.environment})
