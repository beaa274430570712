"""Runs alma-stream in a process forked from this one, and its commands in processes forked from that."""

import os
from pathlib import Path
from typing import Optional, Sequence

import pytest

from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.images import stage_trainer
from tests.engine import TIMEOUT, fork, fork_commands_from_here, import_engine
from tests.kills.crashes import Crash
from tests.scripts import print_to


def launch(arguments: Sequence[str], log: Path, crash: Crash) -> int:
    """Run it to its end, or to where it crashes.

    Args:
        arguments: of the command.
        log: gets what it prints.
        crash: where.

    Returns:
        Exit status as `subprocess.Popen.returncode` has it.
    """
    import_engine()

    def run() -> Optional[int]:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        print_to(output, output)
        stage_trainer.SAVE_EVERY_SECONDS = 0.0
        fork_commands_from_here(pytest.MonkeyPatch())
        crash.arm()
        return alma_stream(arguments)

    return fork(run).wait(TIMEOUT)
