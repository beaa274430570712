"""Runs a command in a process forked from this one, and the commands that it starts in processes forked from that.

All of them find fairseq imported, which is what makes thousands of launches possible.
"""

import importlib
import os
from pathlib import Path
from typing import IO, Any, Callable, Mapping, Optional, Sequence

import pytest

from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.images import stage_trainer
from fairseq_alma.runs import workers
from tests.engine import TIMEOUT, Forked, fork, fork_commands_from_here, import_engine
from tests.kills.crashes import Crash
from tests.scripts import end_with, print_to

# Each command but alma-stream would import it by itself.
PRELOADED = (
    "transformers",
    "fairseq_alma.exchange.export",
    "fairseq_alma.exchange.import_folder",
)
Main = Callable[[Sequence[str]], Optional[int]]


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


def begin(arguments: Sequence[str], log: Path, crash: Crash, main: Main) -> Forked:
    """Begin a command; see `launch`."""
    import_engine()
    for name in PRELOADED if main is not alma_stream else ():
        importlib.import_module(name)
    child = os.fork()
    if child == 0:
        end_with(lambda: _run_command_of_ours(arguments, log, crash, main))
    return Forked(child)


def _run_command_of_ours(arguments: Sequence[str], log: Path, crash: Crash, main: Main) -> Optional[int]:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    print_to(output, output)
    stage_trainer.SAVE_EVERY_SECONDS = 0.0
    fork_commands_from_here(pytest.MonkeyPatch())
    workers.start_process = _begin_member
    crash.arm()
    try:
        return main(arguments)
    finally:
        crash.end()


def _begin_member(words: Sequence[str], stderr: IO[bytes], env: Mapping[str, str], **options: Any) -> Forked:
    """Begin an ``alma-stream`` for some members of a run, as ``--jobs`` does."""

    def act() -> int:
        os.environ.update(env)
        print_to(os.open(os.devnull, os.O_WRONLY), stderr.fileno())
        return alma_stream(words[1:])

    return fork(act)
