"""A process that has imported fairseq once, and in which each stock command begins as a fork instead of an interpreter.

A forked command runs the same script as the main program, with the same arguments, variables, files, signals and exit
status. What differs: the seconds that imports take, what libraries say while they are imported (not repeated in its
log), and the seed of Python's string hashes (the same in all commands of a run; no figure depends on it).

Not the standard library's ``multiprocessing.forkserver``: that says on alma-stream's own terminal what libraries print
while they are imported, passes over those that fail, imports alma-stream's script into every child, and ends a child
in its own way (a traceback of its own, no exit handlers).
"""

import atexit
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Mapping, NamedTuple, Optional, Sequence

from fairseq_alma.runs.child_processes import die_with_parent

# The script is executed here, where next to nothing is beneath it on the stack: libraries look there for who is warned.
_MAIN = """\
from fairseq_alma.text import forked_command
path, script = forked_command.serve({})
try:
    exec(compile(path.read_bytes(), path, "exec"), script)
except SystemExit as ending:
    forked_command.leave(ending)
"""


class Request(NamedTuple):
    """A command to begin.

    Attributes:
        program: path of the script.
        arguments: its arguments.
        environment: variables that it gets beside those of the server.
        num_files: number of file descriptors that follow: for its output, and to keep open.
    """

    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    num_files: int


class ForkServer:
    """The process, as alma-stream sees it. It carries out one command at a time, and ends with us."""

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self.command: Optional[ForkedCommand] = None
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                # -P: a file here that is called as a library must not be taken for it.
                [sys.executable, "-P", "-c", _MAIN.format(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def is_like_here(self) -> bool:
        """Tell whether a command of the server finds the variables and the working directory of this process."""
        return self.surroundings == _surroundings()

    def begin(self, request: Request, files: Sequence[int]) -> "Optional[ForkedCommand]":
        """Begin a command; None if the server is busy, or has ended: because fairseq cannot be imported, say."""
        if self.command is not None and self.command.poll() is None:
            return None
        try:
            self.connection.send(tuple(request))
            for file in files:
                send_handle(self.connection, file, self.process.pid)
            self.command = ForkedCommand(self.connection.recv(), self.connection)
            return self.command
        except (OSError, EOFError):
            return None
        except BaseException:
            self.close()  # interrupted: nobody knows whether the command has begun
            raise

    def close(self) -> None:
        """End the process, and what is left of a command."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


_server: Optional[ForkServer] = None


def begin_forked(request: Request, files: Sequence[int]) -> "Optional[ForkedCommand]":
    """Begin a command in the server, which is started where there is none yet.

    Args:
        request: the command; its program is a script as `is_script_of_this_python` finds them.
        files: file descriptors: where its output goes, and those to keep open.

    Returns:
        The command; None where it must be run in another way, which then says why.
    """
    global _server
    if _server is None or not _server.is_like_here():
        if _server is not None:
            _server.close()
            atexit.unregister(_server.close)
        _server = ForkServer()
        atexit.register(_server.close)
    return _server.begin(request, files)


class ForkedCommand:
    """A command that has begun, to be used as a `subprocess.Popen`.

    Attributes:
        pid: process id, and that of its group.
        returncode: exit status, negative for the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int, connection: "Connection") -> None:
        self.pid = pid
        self.returncode: Optional[int] = None
        self._connection = connection

    def poll(self) -> Optional[int]:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._receive()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` after so many seconds."""
        if self.returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        status = self.poll()
        assert status is not None
        return status

    def _receive(self) -> int:
        try:
            return self._connection.recv()
        except (OSError, EOFError):
            return -signal.SIGKILL  # somebody ended the server, and the command with it


def is_script_of_this_python(program: str) -> bool:
    """Tell whether a program is what pip installs for a command, for the interpreter that runs us."""
    with open(program, "rb") as file:
        start, _, interpreter = file.readline().rstrip().partition(b"#!")
    path, ours = Path(os.fsdecode(interpreter)), Path(sys.executable)
    return not start and path.parent == ours.parent and path.is_file() and path.samefile(ours)


def _surroundings() -> tuple[dict[str, str], int, int]:
    folder = os.stat(".")
    return dict(os.environ), folder.st_dev, folder.st_ino
