"""The inside of `fork_server`: a process that imports fairseq and forks, and what makes its child a command."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import random
import signal
import sys
import threading
from argparse import Namespace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Optional, Sequence

import fairseq_alma
from fairseq_alma.runs.child_processes import die_with_parent
from fairseq_alma.text.fork_server import Request

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
    script.__file__ = request.program
    return Path(request.program), vars(script)


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
    # As fairseq imports what --user-dir names, so that it does not say in each log that this was done already.
    import_user_module(Namespace(user_dir=str(Path(fairseq_alma.__file__).parent)))
    # All children share what stands there now; the garbage collector would write into it, and so copy it.
    gc.collect()
    gc.freeze()


def _await_request(connection: "Connection") -> tuple[Request, list[int]]:
    """Fork for each request; return in the child, with the request and its file descriptors."""
    die, group = die_with_parent(), None

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
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, before)
            if die is not None:
                die()
            os.setsid()
            # From here, because alma-stream sends its signals to the group.
            connection.send(os.getpid())
            return request, files
        group = child
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        group = None
        connection.send(os.waitstatus_to_exitcode(status))


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
    name = os.path.basename(request.program)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    if name != _LOGS_AS_IMPORTED:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    _seed_anew()
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
