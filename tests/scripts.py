"""Run the scripts of this environment in forks of this process, where all modules are imported.

A command of fairseq spends most of a small test on importing; that it works from a shell is tested in
``tests/cli/test_stream_end_to_end.py`` and by the recipes.
"""

import contextlib
import logging
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryFile
from typing import Callable, Mapping, Optional, Sequence

import pytest

from fairseq_alma.errors import AlmaError


def end_with(body: Callable[[], Optional[int]]) -> None:
    """Run a function and exit this process with its status."""
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
    """Redirect the standard streams of this process to files."""
    for standard, file in ((1, out), (2, err)):
        os.dup2(file, standard)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_here(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Optional[Mapping[str, str]] = None
) -> None:
    """Run a script in this process; ``log`` has the options of `logging.basicConfig`."""
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
    """Return the one-line error of a command, which must not write into the folder."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(AlmaError) as error:
        main([str(word) for word in words])
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before
    return str(error.value)


def usage_error(capsys: pytest.CaptureFixture[str], call: Callable[..., object], *arguments: object) -> str:
    """Return the last line of a usage error."""
    with pytest.raises(SystemExit) as raised:
        call(*arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def run_script(
    words: Sequence[str], *, cwd: Optional[Path] = None, typed: str = "", log: Optional[Mapping[str, str]] = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment, with the result of `subprocess.run` with ``text=True``.

    Args:
        words: the command line; the first word is a script next to this interpreter.
        cwd: working directory.
        typed: standard input.
        log: options of an earlier `logging.basicConfig`; None: fairseq's command configures logging.
    """
    with TemporaryFile("w+") as stdin, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
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
