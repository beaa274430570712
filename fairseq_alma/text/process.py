"""Run a stock command in a process of its own: all output to a log, watched line by line, dead when we are."""

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.workers import describe_status, end_processes, find_program, start_process
from fairseq_alma.terminal import shell_words
from fairseq_alma.text.fork_server import (
    MODULE,
    ForkedCommand,
    Request,
    begin_forked,
    is_of_this_python,
)
from fairseq_alma.watch.progress import StageProgress

POLL_SECONDS = 0.2
LINE_LENGTH = 110
MAX_REASON = 400
LAST_WORDS_SECONDS = 5.0
"""In which the processes that are left say why, once one of several has failed."""
Child = Union[ForkedCommand, "subprocess.Popen[bytes]"]
_ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception)\b.*")


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        program: name of an installed command.
        groups: its arguments, grouped as they are printed: one group a line.
        environment: variables that it gets beside those of this process.
        num_procs: so many processes run it together, each with the variables that ``torchrun`` sets.
    """

    program: str
    groups: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    num_procs: int = 1

    @property
    def arguments(self) -> list[str]:
        """All arguments in order."""
        return [word for group in self.groups for word in group]

    def __str__(self) -> str:
        """Spell the command for a shell, in lines; the words of a group stay together."""
        launch = [f"{name}={shell_words([value])}" for name, value in self.environment.items()]
        begin, end = "", ""
        if self.num_procs > 1:
            launch += ["MASTER_ADDR=localhost MASTER_PORT=29500"]
            launch += [f"{name}={value}" for name, value in _sizes(self.num_procs).items()]
            launch += ["RANK=$RANK LOCAL_RANK=$RANK"]
            begin, end = f"for RANK in {' '.join(map(str, range(self.num_procs)))}; do ", " & done; wait"
        lines = [begin + " ".join([*launch, self.program])]
        for words in (shell_words(group) for group in self.groups if group):
            if len(lines) > 1 and len(lines[-1]) + len(words) < LINE_LENGTH:
                lines[-1] += " " + words
            else:
                lines.append("    " + words)
        return " \\\n".join(lines) + end


def module_command(name: str, groups: Iterable[tuple[str, ...]]) -> Command:
    """Return the command that runs a module of this package; a file here that is called as a library is not taken."""
    return Command(Path(sys.executable).name, ((*MODULE, name), *groups))


def run_logged(command: Command, log: Path, watch: Callable[[str], None], keep_open: Sequence[int] = ()) -> None:
    """Run a command to its end.

    Args:
        command: what to run.
        log: gets the command line and everything that the command prints, after what is there already.
        watch: called with each line that appears in the log.
        keep_open: file descriptors that the command inherits.

    Raises:
        AlmaError: the command failed; says how, and where the log is.
    """
    program = find_program(command.program)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        output.write(f"$ {command}\n".encode())
        output.flush()
        tail = _Tail(log, output.tell(), watch)
        children = [_begin(command, place, program, output.fileno(), keep_open) for place in _places(command.num_procs)]
    try:
        failure = _wait(children, tail.read)
    finally:
        end_processes(children)
    tail.read()
    if failure is not None:
        raise AlmaError(f"{log}: {command.program} failed ({failure}): {tail.last_error()}")


def _places(num_procs: int) -> list[dict[str, str]]:
    """Return for each of several processes the variables by which they find each other; as ``torchrun`` sets them."""
    if num_procs == 1:
        return [{}]
    together = {"MASTER_ADDR": "localhost", "MASTER_PORT": _free_port(), **_sizes(num_procs)}
    return [{**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_procs)]


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def _sizes(num_procs: int) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {"WORLD_SIZE": str(num_procs), "LOCAL_WORLD_SIZE": str(num_procs), "OMP_NUM_THREADS": threads}


def _wait(children: Sequence[Child], watch: Callable[[], None]) -> Optional[str]:
    """Wait until all children have ended, or for a moment after one has failed.

    Returns:
        What became of the one that failed, first of all one that was killed; None if all is well.
    """
    deadline = math.inf
    while waiting := next((child for child in children if child.poll() is None), None):
        if time.monotonic() >= deadline:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting.wait(timeout=POLL_SECONDS)
        watch()
        if deadline == math.inf and any(child.poll() for child in children):
            deadline = time.monotonic() + LAST_WORDS_SECONDS
    status, rank = min((child.poll() or 0, rank) for rank, child in enumerate(children))
    if status == 0:
        status, rank = max((child.poll() or 0, rank) for rank, child in enumerate(children))
    return (f"process {rank}, " if len(children) > 1 else "") + describe_status(status) if status else None


def _begin(command: Command, place: Mapping[str, str], program: str, output: int, keep_open: Sequence[int]) -> Child:
    """Begin a command, forked from a process that has imported fairseq where that can be.

    Args:
        command: what to run.
        place: variables that tell one of several processes its rank; see `_places`.
        program: the command's path.
        output: file descriptor of the log.
        keep_open: file descriptors that the command inherits.
    """
    environment = {**place, **command.environment}
    if sys.platform.startswith("linux") and is_of_this_python(program, command.arguments):
        request = Request(program, command.arguments, environment, 1 + len(keep_open))
        forked = begin_forked(request, [output, *keep_open])
        if forked is not None:
            return forked
    return start_process(
        [program, *command.arguments],
        env={**os.environ, **environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=tuple(keep_open),
    )


def parse_log_line(line: str) -> Optional[dict[str, Any]]:
    """Return the figures in a line that fairseq wrote with ``--log-format json``, or None."""
    start = line.find("| {")
    if start < 0 or "train_inner" not in line[:start]:
        return None
    try:
        return json.loads(line[start + 2 :])
    except ValueError:
        return None


def watch_fairseq(
    progress: StageProgress, words_per_token: float, max_epoch: Optional[int] = None, first_update: int = 0
) -> Callable[[str], None]:
    """Return what takes the lines of a log and shows them.

    Args:
        progress: of the training.
        words_per_token: of the data; fairseq counts tokens.
        max_epoch: passes over the data after which the training ends, if updates do not end it before.
        first_update: updates that the optimizer had made when the stage began; fairseq counts them too.
    """
    limit = progress.max_update

    def watch(line: str) -> None:
        figures = parse_log_line(line)
        if figures is None or "num_updates" not in figures:
            return
        num_updates, epochs = int(figures["num_updates"]) - first_update, float(figures.get("update") or 0)
        if max_epoch is not None and epochs > 0:
            # fairseq's "update" counts passes over the data, with a fraction.
            by_epochs = max(num_updates, round(num_updates * max_epoch / epochs))
            progress.max_update = by_epochs if limit is None else min(limit, by_epochs)
        loss = figures["nll_loss"] if "nll_loss" in figures else figures["loss"]
        rate = float(figures["wps"]) * words_per_token if "wps" in figures else None
        progress.update(num_updates, float(loss), rate)

    return watch


class _Tail:
    """Reads what a command appends to its log."""

    def __init__(self, log: Path, offset: int, watch: Callable[[str], None]) -> None:
        self.log = log
        self.offset = offset
        self.watch = watch
        self.unfinished = b""
        self.last_lines: list[str] = []

    def read(self) -> None:
        """Hand on the lines that are new."""
        with open(self.log, "rb") as file:
            file.seek(self.offset)
            new = file.read()
        self.offset += len(new)
        *lines, self.unfinished = (self.unfinished + new).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text:
                self.last_lines = [*self.last_lines[-19:], text]
            self.watch(text)

    def last_error(self) -> str:
        """Return the line that says why the command failed, as far as one can tell."""
        rest = self.unfinished.decode(errors="replace").strip()
        lines = self.last_lines + ([rest] if rest else [])
        errors = [line for line in lines if _ERROR_LINE.fullmatch(line)]
        reason = (errors or lines or ["it printed nothing"])[-1]
        # argparse lists all choices; they are in the log.
        return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "…"
