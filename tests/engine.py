"""Makes fairseq cheap for tests: imported once, its options parsed once, its commands forked from this process.

What a shell or `subprocess` starts, and `tests/text/test_fork_server.py`, have the real thing.
"""

import atexit
import functools
import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import pytest

from fairseq_alma.runs.workers import die_with_parent
from fairseq_alma.text import process
from fairseq_alma.text.fork_server import PRELOADED, Request
from tests.scripts import end_with, print_to, run_here

TIMEOUT = 1800.0
PLACE = "the-place-of-"
_NUMBERS = (
    "megabatch wait seed max_update max_epoch save_interval_updates batch_size batch_size_valid num_experts "
    "tokens_per_sample decoder_layers decoder_embed_dim decoder_ffn_embed_dim decoder_attention_heads log_interval "
    "distributed_world_size distributed_rank"
)
VARIED = {name: 2_000_000_000 + number for number, name in enumerate(_NUMBERS.split())} | {
    "gen_subset": PLACE + "gen_subset"
}
"""Options whose value decides nothing else in a configuration, and what stands for the value there."""
NAMES = {stands: name for name, stands in VARIED.items()}


@functools.cache
def import_engine() -> None:
    """Import what each command would import by itself."""
    for name in (*PRELOADED, "fairseq_alma.checkpoints.model_facts"):
        importlib.import_module(name)


def parse_options_once(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let commands share what takes most of a small run: to turn the same options into a configuration.

    Args:
        patch: undoes it.
        cache: folder in which configurations stay, for this process and all others. Texts that name a place, and what
            `VARIED` names, differ from test to test, so they are left out of them and put in when one is read.
    """
    cache.mkdir(exist_ok=True)
    import_engine()
    found = sys.modules["fairseq.dataclass.utils"].convert_namespace_to_omegaconf
    parse = getattr(found, "__wrapped__", found)

    @functools.wraps(parse)
    def parse_once(options: Namespace) -> Any:
        given = vars(options)
        left_out = {name: text for name, text in given.items() if str(text).startswith(("/", "file:"))}
        left_out |= {name: given[name] for name, stands in VARIED.items() if type(given.get(name)) is type(stands)}
        named = Namespace(**{**given, **{name: VARIED.get(name, PLACE + name) for name in left_out}})
        path = cache / hashlib.sha256(repr(sorted(vars(named).items())).encode()).hexdigest()
        if not path.exists():
            new = path.with_suffix(f".{os.getpid()}")
            with open(new, "wb") as file:
                _Template(file).dump(parse(named))
            new.rename(path)
        with open(path, "rb") as file:
            return _Filled(file, left_out).load()

    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(parse.__name__) is found:
            patch.setattr(module, parse.__name__, parse_once)


class _Template(pickle.Pickler):
    def persistent_id(self, value: Any) -> Optional[str]:
        if type(value) is int:
            return NAMES.get(value)
        is_place = isinstance(value, str) and value.startswith(PLACE)
        return value.removeprefix(PLACE) if is_place else None


class _Filled(pickle.Unpickler):
    def __init__(self, file: Any, left_out: dict[str, Any]) -> None:
        super().__init__(file)
        self.persistent_load = left_out.__getitem__


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


def fork_commands_from_here(patch: pytest.MonkeyPatch) -> None:
    """Let the commands of a stage begin as forks of this process: no server, which would outlive who is killed."""
    patch.setattr(process, "begin_forked", _fork)


def fork(act: Callable[[], Optional[int]]) -> Forked:
    """Let a child of this process act, in a session of its own, and end with it."""
    die = die_with_parent()
    child = os.fork()
    if child == 0:
        if die is not None:
            die()
        os.setsid()
        end_with(act)
    return Forked(child)


def _fork(request: Request, files: Sequence[int]) -> Forked:
    import_engine()
    return fork(lambda: _run(request, files[0]))


def _run(request: Request, output: int) -> None:
    print_to(output, output)
    atexit._clear()  # of this process: it would remove its temporary folders
    run_here(request.program, request.arguments, request.environment)
