"""Runs the scripts of this environment in processes forked from this one, which find everything imported.

A command of fairseq spends most of a small test on importing; that it works from a shell is tested in
``tests/cli/test_stream_end_to_end.py`` and by the recipes.
"""

import contextlib
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import pytest

from fairseq_alma.errors import AlmaError


def end_with(body: Callable[[], Optional[int]]) -> None:
    """End this process with the status of what it is to do."""
    status: object = 1
    try:
        status = body()
    except SystemExit as ending:
        status = ending.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(status or 0))  # type: ignore[call-overload]


def print_to(out: int, err: int) -> None:
    """Let the standard streams of this process be these files."""
    for standard, file in ((1, out), (2, err)):
        os.dup2(file, standard)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_here(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Optional[Mapping[str, str]] = None
) -> None:
    """Run a script as if this process were its interpreter; ``log`` has the options that logging is set up with."""
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    logging.root.handlers.clear()
    if log is None:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)  # as fairseq's commands do when they are imported
    else:
        logging.basicConfig(**log)  # type: ignore[arg-type]
    if "-m" in arguments[:2]:  # an interpreter that is told a module
        module, *sys.argv[1:] = arguments[[*arguments].index("-m") + 1 :]
        runpy.run_module(module, run_name="__main__")
    else:
        runpy.run_path(program, run_name="__main__")


def refused(main: Callable[[list[str]], object], folder: Path, *words: object) -> str:
    """Return the one line that a command ends with, having written nothing into a folder."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(AlmaError) as error:
        main([str(word) for word in words])
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before
    return str(error.value)


def usage_error(capsys: pytest.CaptureFixture[str], call: Callable[..., object], *arguments: object) -> str:
    """Return the last line of what a call says that ends as a usage error."""
    with pytest.raises(SystemExit) as raised:
        call(*arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def run_script(
    words: Sequence[str], *, cwd: Optional[Path] = None, typed: str = "", log: Optional[Mapping[str, str]] = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment and return what `subprocess.run` with ``text=True`` would.

    Args:
        words: of the command; the first is a script beside this interpreter.
        cwd: folder to run in.
        typed: is on its standard input.
        log: what was given to `logging.basicConfig` before; None: nothing, and fairseq's commands set it up.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(typed)
        stdin.seek(0)
        child = os.fork()
        if child == 0:
            end_with(lambda: _run(words, cwd, log, (stdin.fileno(), out.fileno(), err.fileno())))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([*words], status, out.read(), err.read())


def _run(
    words: Sequence[str], cwd: Optional[Path], log: Optional[Mapping[str, str]], files: tuple[int, int, int]
) -> None:
    os.dup2(files[0], 0)
    sys.stdin = os.fdopen(0, closefd=False)
    print_to(*files[1:])
    if cwd is not None:
        os.chdir(cwd)
    run_here(str(Path(sys.executable).with_name(words[0])), words[1:], {}, log)
