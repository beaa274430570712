"""A process that has imported fairseq once, and in which each stock command begins as a fork instead of an interpreter.

A forked command runs the same script as the main program, with the same arguments, variables, files, signals and exit
status. What differs: the seconds that imports take, what libraries say while they are imported (not repeated in its
log), the seed of Python's string hashes (the same in all commands of a run; no figure depends on it), and one more open
file, by which it hands on what those after it need not find out again (`PassedOn`):

- files of the stream, and checkpoints, whose content was verified;
- its options as hydra composes them, which takes half of a small stage: the next command of the same kind differs in a
  few values, a mega-batch, a folder, a seed. These are set in what was composed before, each as hydra sets it.

What is damaged or missing in it costs the time that it would have saved.

Not the standard library's ``multiprocessing.forkserver``: that says on alma-stream's own terminal what libraries print
while they are imported, passes over those that fail, imports alma-stream's script into every child, and ends a child
in its own way (a traceback of its own, no exit handlers).
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from argparse import Namespace
from copy import deepcopy
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import fairseq_alma
from fairseq_alma.files import VERIFIED
from fairseq_alma.runs.workers import die_with_parent, start_process

# The script is executed here, where next to nothing is beneath it on the stack: libraries look there for who is warned.
_MAIN = """\
from fairseq_alma.text import fork_server
path, script = fork_server.serve({})
try:
    exec(compile(path.read_bytes(), path, "exec"), script)
except SystemExit as ending:
    fork_server.leave(ending)
"""
# fairseq_cli's own modules are left to the child: they set up logging, each in its own way, as they are imported.
PRELOADED = (
    "fairseq",
    "fairseq.data.data_utils_fast",
    "fairseq.data.token_block_utils_fast",
    "fairseq.model_parallel.megatron_trainer",
    "fairseq.quantization_utils",
    "fairseq.sequence_scorer",
    "fairseq_alma.text.grow",
    "fairseq_alma.checkpoints.ensemble_file",
    "hydra._internal.core_plugins",
    "torch._dynamo",  # torch's optimizers import it at their first step
)
# It imports fairseq before it sets up logging, so that what some models of fairseq set up as they are imported stays.
_LOGS_AS_IMPORTED = "fairseq-eval-lm"
# Where an import asks for a GPU, the question must not start CUDA, which does not survive a fork.
_ASK_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_PR_SET_NAME = 15
MODULE = ["-P", "-m"]
"""What an interpreter is told before the name of a module of this package."""


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
            self.process = start_process(
                # -P: a file here that is called as a library must not be taken for it.
                [sys.executable, "-P", "-c", _MAIN.format(theirs.fileno())],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
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
        request: the command; a script or module as `is_of_this_python` finds them.
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


def is_of_this_python(program: str, arguments: Sequence[str]) -> bool:
    """Tell whether a command is a script that pip installs for the interpreter that runs us, or a module for it."""
    if module_of(arguments) is not None:
        return os.path.samefile(program, sys.executable)
    with open(program, "rb") as file:
        start, _, interpreter = file.readline().rstrip().partition(b"#!")
    path, ours = Path(os.fsdecode(interpreter)), Path(sys.executable)
    return not start and path.parent == ours.parent and path.is_file() and path.samefile(ours)


def module_of(arguments: Sequence[str]) -> Optional[str]:
    """Return the module that an interpreter is told to run, in the one spelling that `process.module_command` has."""
    return arguments[2] if [*arguments[:2]] == MODULE else None


def _surroundings() -> tuple[dict[str, str], int, int]:
    folder = os.stat(".")
    return dict(os.environ), folder.st_dev, folder.st_ino


def serve(file: int) -> tuple[Path, dict[str, Any]]:
    """Be the server; return in a child of it, ready to be the command.

    Args:
        file: descriptor of a connection to alma-stream.

    Returns:
        Path and variables of the command's script.
    """
    _import_all()
    with Connection(file) as connection:
        request, files = _await_request(connection)
    _become(request, files)
    script = sys.modules["__main__"] = ModuleType("__main__")
    script.__file__ = sys.argv[0]
    return Path(sys.argv[0]), vars(script)


def _import_all() -> None:
    before = dict(os.environ)
    os.environ.update(_ASK_WITHOUT_CUDA)
    for name in PRELOADED:
        importlib.import_module(name)
    from fairseq.utils import import_user_module
    from hydra.core.plugins import Plugins

    for name in _ASK_WITHOUT_CUDA.keys() - before.keys():
        del os.environ[name]
    Plugins.instance()  # finds hydra's plugins
    inspect.stack()  # as hydra asks who calls it, for which Python looks at the file of every module, once
    # As fairseq imports what --user-dir names, so that it does not say in each log that this was done already.
    import_user_module(Namespace(user_dir=str(Path(fairseq_alma.__file__).parent)))
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        each.atexit = False  # torch's operators, one by one: `leave` takes nothing apart that was imported
    # All children share what stands there now; the garbage collector would write into it, and so copy it.
    gc.collect()
    gc.freeze()


def _await_request(connection: "Connection") -> tuple[Request, list[int]]:
    """Fork for each request; return in the child, with the request and its file descriptors."""
    die, group, passed_on = die_with_parent(), None, PassedOn()

    def end(number: int, frame: Optional[FrameType]) -> None:
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # workers of the command too
        os._exit(1)

    before = signal.signal(signal.SIGTERM, end)
    while True:
        try:
            request = Request(*connection.recv())
        except EOFError:
            os._exit(0)  # nothing is left to write, and taking apart what was imported would take a while
        files = [recv_handle(connection) for _ in range(request.num_files)]
        learned = os.memfd_create("learned")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, before)
            if die is not None:
                die()
            os.setsid()
            # From here, because alma-stream sends its signals to the group.
            connection.send(os.getpid())
            passed_on.begin(learned)
            return request, files
        group = child
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        group = None
        connection.send(os.waitstatus_to_exitcode(status))
        passed_on.take(learned)


def _become(request: Request, files: Sequence[int]) -> None:
    """Turn this process into the command: what a new interpreter would be once it has imported fairseq."""
    output, *keep_open = files
    for standard in (sys.stdout, sys.stderr):
        os.dup2(output, standard.fileno())
    os.close(output)
    for file in keep_open:
        os.set_inheritable(file, True)
    os.environ.update(request.environment)
    sys.argv = [request.program, *request.arguments]
    _require_cuda_or_restart()
    name, module = os.path.basename(request.program), module_of(request.arguments)
    if module is not None:
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None, module
        sys.argv = [found.origin, *request.arguments[3:]]
        name = module.rpartition(".")[2]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    if name != _LOGS_AS_IMPORTED:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    _seed_anew()
    if module is None:
        sys.path.insert(0, os.path.dirname(request.program))
    sys.excepthook = _show_error


def _require_cuda_or_restart() -> None:
    """Become a new interpreter where an import has started CUDA after all."""
    import torch

    if torch.cuda._is_in_bad_fork():
        os.execv(sys.argv[0], sys.argv)


def _seed_anew() -> None:
    """Let random numbers without a seed differ from command to command, as they do in new interpreters."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()


def leave(ending: SystemExit) -> None:
    """End a command as the interpreter does, but for taking apart what was imported, if it has gone well.

    Raises:
        SystemExit: the one given, if it says that the command has failed.
    """
    if ending.code not in (None, 0):
        raise ending
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for standard in (sys.stdout, sys.stderr):
        standard.flush()
    os._exit(0)


def _show_error(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    """Print an uncaught exception as the interpreter does, from the script on."""
    trace = trace and trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


@dataclass
class Composed:
    """Options as hydra composes them.

    Attributes:
        words: what was composed, each as ``key=value``.
        config: the result.
    """

    words: Sequence[str]
    config: Any

    @classmethod
    def of(cls, words: Sequence[str]) -> "Composed":
        """Compose options as `fairseq.dataclass.utils.convert_namespace_to_omegaconf` does."""
        import fairseq
        from fairseq.dataclass import utils
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
        with initialize_config_dir(str(Path(fairseq.__file__).parent / "config")):
            return cls(words, utils.compose("config", overrides=words, strict=False))

    def fits(self, words: Sequence[str]) -> bool:
        """Tell whether other words name the same options, and the same where one names a group: a key without a dot."""
        pairs = zip(self.words, words, strict=False)
        return len(words) == len(self.words) and all(
            before == now or (_key(before) == _key(now) and "." in _key(now)) for before, now in pairs
        )

    def with_values(self, words: Sequence[str]) -> Any:
        """Return what hydra would make of words that fit."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from omegaconf import OmegaConf

        config, known = deepcopy(self.config), set(self.words)
        for each in OverridesParser.create().parse_overrides([word for word in words if word not in known]):
            OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
        return config


def _key(word: str) -> str:
    return word.partition("=")[0]


@dataclass
class PassedOn:
    """What is known by now, in the server and, as they are forked from it, in its commands.

    Attributes:
        composed: the options of commands, the newest first.
    """

    composed: list[Composed] = field(default_factory=list)

    def begin(self, file: int) -> None:
        """Use what is known in this process, a command, and write what is new when it ends.

        Args:
            file: descriptor that the server reads.
        """
        from fairseq.dataclass import utils

        num_verified, own, process, compose = len(VERIFIED), list[Sequence[str]](), os.getpid(), utils.compose

        def compose_once(name: str, overrides: Sequence[str], strict: Optional[bool] = None) -> Any:
            known = next((each for each in self.composed if each.fits(overrides)), None)
            if known is not None:
                return known.with_values(overrides)
            if len({*map(_key, overrides)}) == len(overrides):
                own.append(overrides)
            return compose(name, overrides=overrides, strict=strict)

        def write() -> None:
            if os.getpid() == process:  # no worker of the command
                with contextlib.suppress(OSError), os.fdopen(file, "w") as opened:
                    json.dump([VERIFIED.since(num_verified), own], opened)

        utils.compose = compose_once
        atexit.register(write)

    def take(self, file: int) -> None:
        """Take over what a command has written that has ended."""
        with os.fdopen(file, "rb") as opened:
            opened.seek(0)
            content = opened.read()
        with contextlib.suppress(Exception):  # of options that the user's own code brings, and the server does not know
            verified, composed = json.loads(content)
            VERIFIED.take((tuple(identity), sha256) for identity, sha256 in verified)
            for words in composed:
                self.composed = [Composed.of(words), *self.composed][:MOST_COMPOSED]
                gc.freeze()  # shared with all children from now on


MOST_COMPOSED = 8
"""Kinds of commands whose options are kept; a run has two or three."""
