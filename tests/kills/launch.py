"""Run alma-stream in a fork of this process, and its commands in forks of that process."""

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
    """Run alma-stream until it ends or crashes.

    Args:
        arguments: arguments of the command.
        log: file for its output.
        crash: the crash.

    Returns:
        Exit status in the format of `subprocess.Popen.returncode`.
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
