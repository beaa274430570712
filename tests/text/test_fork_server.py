"""A command that is forked must look, to whoever started it, like one that is a new interpreter."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairseq_alma
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.text import fork_server, process
from fairseq_alma.text.fork_server import ForkServer, is_of_this_python
from fairseq_alma.text.process import Command, run_logged
from tests.cli.test_stream_end_to_end import TRAIN
from tests.forked import is_alive, wait_until
from tests.kills.learners import write_text
from tests.scripts import run_script

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="commands are forked on Linux alone")
pytest.importorskip("fairseq")


@pytest.fixture(autouse=True)
def the_server(monkeypatch):
    """The server itself: one for all tests, though pytest sets a variable anew for each."""
    surroundings = fork_server._surroundings

    def without_test():
        variables, *folder = surroundings()
        return {name: value for name, value in variables.items() if name != "PYTEST_CURRENT_TEST"}, *folder

    monkeypatch.setattr(fork_server, "_surroundings", without_test)
    monkeypatch.setattr(process, "begin_forked", fork_server.begin_forked)


class Scripts:
    """Runs Python scripts as if pip had installed them, forked or not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = folder / "a.log"
        self.monkeypatch = monkeypatch

    def run(self, code, *arguments, forked=True, name="fairseq-test", watch=None, **keywords):
        """Return what the script prints, and what is wrong with it."""
        script = self.folder / name
        script.write_text(f"#!{sys.executable}\n{code}")
        script.chmod(0o755)
        self.monkeypatch.setattr(process, "find_program", lambda program: str(script))
        self.monkeypatch.setattr(process, "is_of_this_python", lambda program, arguments: forked)
        self.log.unlink(missing_ok=True)
        command = Command(name, (arguments,), keywords.pop("environment", {}))
        error = None
        try:
            run_logged(command, self.log, watch or (lambda line: None), **keywords)
        except AlmaError as caught:
            error = str(caught)
        first, _, printed = self.log.read_text().partition("\n")
        assert first.startswith("$ ")
        return printed, error


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    return Scripts(tmp_path, monkeypatch)


@pytest.fixture
def another_server(monkeypatch):
    """Let the test start a server of its own, for which an environment may be set."""
    monkeypatch.setattr(fork_server, "_server", None)
    yield
    if fork_server._server is not None:
        fork_server._server.close()


def server():
    return fork_server._server.process


ENDINGS = {
    "the end of the script": "print('fine')",
    "sys.exit()": "import sys; print('fine'); sys.exit()",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "sys.exit(3)": "import sys; print('no', end=''); sys.exit(3)",
    "sys.exit('text')": "raise SystemExit('stream.json: not there')",
    "an exception": "def f():\n    raise ValueError('no such thing')\nprint('so far'); f()",
    "an exception with a cause": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise OSError('x') from error",
    "a syntax error": "print(",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "for want of memory": "import os; os.kill(os.getpid(), 9)",
    "os._exit": "import os; print('lost'); os._exit(4)",
    "exit handlers": "import atexit, sys; atexit.register(print, 'handled'); print('end'); sys.exit()",
    "a thread that is still at work": (
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start(); sys.exit()"
    ),
    "a wrong option": "import argparse; argparse.ArgumentParser().parse_args()",
}


@pytest.mark.parametrize("code", ENDINGS.values(), ids=ENDINGS.keys())
def test_every_ending_leaves_the_same_log_and_the_same_error_as_in_a_new_interpreter(scripts, code):
    expected = scripts.run(code, "--unknown", forked=False)
    assert scripts.run(code, "--unknown") == expected


def test_what_a_script_sees_of_its_process_is_what_it_sees_in_a_new_interpreter(scripts, tmp_path):
    code = (
        "import logging, os, signal, sys, threading\n"
        "print(__name__, __file__, sys.argv, sys.path[0], sys.modules['__main__'].__file__, os.getcwd())\n"
        "print(sys.stdin.read(), sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.errors)\n"
        "print(logging.root.handlers, logging.root.level, threading.active_count(), os.environ['ITS'])\n"
        "print(open('/proc/self/comm').read(), os.getpid() == os.getsid(0) == os.getpgid(0))\n"
        "print([signal.getsignal(number) for number in (2, 13, 15, 17)])\n"
        "files = {n: os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')}\n"
        "print(len([n for n in files if 'memfd:learned' not in files[n]]))\n"  # which the fork server gives beside
    )
    expected = scripts.run(code, "a b", forked=False, environment={"ITS": "a b"})
    assert expected[1] is None
    assert scripts.run(code, "a b", environment={"ITS": "a b"}) == expected
    assert "ITS" not in scripts.run("import os; print(list(os.environ))")[0]


def test_a_command_is_forked_after_the_imports_and_cuda_is_still_to_begin(scripts):
    code = (
        "import os, sys\n"
        "print(os.getppid(), 'fairseq' in sys.modules, 'fairseq_alma.text.task' in sys.modules)\n"
        "import torch; print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"
    )
    assert scripts.run(code) == (f"{server().pid} True True\nFalse False\n", None)


@pytest.mark.gpu
def test_a_forked_command_can_use_the_gpu(scripts):
    code = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    assert scripts.run(code) == ("3.0\n", None)


def test_random_numbers_without_a_seed_differ_from_command_to_command(scripts):
    code = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first, second = (scripts.run(code)[0].split() for _ in range(2))
    assert len(first) == 3
    assert not set(first) & set(second)


def test_memory_is_given_back(scripts):
    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server().pid}/status").read_text())[1])

    scripts.run("pass")
    before = resident()
    assert scripts.run("everything = bytearray(300_000_000); print(len(everything))") == ("300000000\n", None)
    assert resident() < before + 20_000


WORKERS = """
import multiprocessing
def work(x):
    return 2 * x
if __name__ == "__main__":
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(2) as pool:
            print(how, pool.map(work, [1, 2, 3]), flush=True)
"""


def test_a_command_may_have_workers_forked_or_spawned(scripts):
    assert scripts.run(WORKERS) == ("fork [2, 4, 6]\nspawn [2, 4, 6]\n", None)


LEAVE_WORKER = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"


def test_workers_that_a_command_leaves_are_ended(scripts):
    printed, error = scripts.run(LEAVE_WORKER)
    assert error is None
    assert wait_until(lambda: not is_alive(int(printed)))


def test_ctrl_c_ends_the_command_and_its_workers_and_the_next_command_runs(scripts):
    pids = []

    def watch(line):
        pids.extend(map(int, line.split()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scripts.run(f"import os, time; print(os.getpid(), end=' ')\n{LEAVE_WORKER}time.sleep(600)", watch=watch)
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert scripts.run("print('next')") == ("next\n", None)


def test_a_command_keeps_the_files_open_that_it_is_given_and_the_server_does_not(scripts, tmp_path):
    lock = tmp_path / ".lock"
    code = f"import fcntl; fcntl.flock(open({str(lock)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Another open file, which finds ours locked.
        assert "BlockingIOError" in scripts.run(code)[1]
        scripts.run("import os; print(sum('.lock' in os.readlink(f'/proc/self/fd/{n}') for n in range(3, 10)\n"
                    "if os.path.exists(f'/proc/self/fd/{n}')))", keep_open=[file.fileno()])  # fmt: skip
        assert scripts.log.read_text().endswith("\n1\n")
    assert scripts.run(code) == ("", None)


RUNNER = """
import fcntl, sys
from pathlib import Path
from fairseq_alma.text import fork_server, process
process.find_program = lambda name: sys.argv[1]
process.is_of_this_python = lambda program, arguments: True
lock = open(sys.argv[3], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
process.run_logged(process.Command("x", ()), Path(sys.argv[2]), lambda line: None, [lock.fileno()])
"""
SLEEPER = """
import os, time
print("pids", os.getppid(), os.getpid(), flush=True)
if os.fork() == 0:
    print("worker", os.getpid(), flush=True)
time.sleep(600)
"""


def test_kill_9_ends_the_server_the_command_and_its_workers_and_frees_the_lock(tmp_path):
    script, log, lock = tmp_path / "script", tmp_path / "a.log", tmp_path / ".lock"
    script.write_text(SLEEPER)
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(script), str(log), str(lock)])
    pattern = re.compile(r"pids (\d+) (\d+)\nworker (\d+)\n")
    assert wait_until(lambda: log.exists() and pattern.search(log.read_text()))
    pids = [int(pid) for pid in pattern.search(log.read_text()).groups()]
    assert all(map(is_alive, pids))
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_server_that_dies_takes_its_command_along_and_the_next_is_a_new_interpreter(scripts, another_server):
    def watch(line):
        os.kill(server().pid, signal.SIGKILL)

    printed, error = scripts.run("import time; print('begun', flush=True); time.sleep(600)", watch=watch)
    assert (printed, "ended by SIGKILL" in error) == ("begun\n", True)
    code = "import os, sys; print(os.getppid(), 'fairseq' in sys.modules)"
    assert scripts.run(code) == (f"{os.getpid()} False\n", None)


def test_imports_that_fail_leave_the_command_to_say_why(scripts, another_server, monkeypatch, tmp_path):
    (tmp_path / "fairseq.py").write_text("raise OSError('libgomp.so.1: not there')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    printed, error = scripts.run("import fairseq")
    assert printed.startswith("Traceback")
    assert error == f"{scripts.log}: fairseq-test failed (exit status 1): OSError: libgomp.so.1: not there"


@pytest.mark.slow
def test_another_environment_takes_another_server_and_threads_work_there(scripts, another_server, monkeypatch):
    first = fork_server._server = ForkServer()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    code = (
        "import torch; square = torch.ones(1024, 1024)\n"
        "print(torch.get_num_threads(), square.matmul(square).unique().tolist())"
    )
    assert scripts.run(code) == ("2 [1024.0]\n", None)
    assert server().pid != first.process.pid
    assert not is_alive(first.process.pid)


def commands(folder):
    engine = (f"{folder}/S", "--user-dir", str(Path(fairseq_alma.__file__).parent), "--task", "alma_lm")
    train = ("--megabatch", "0", "--save-dir", str(folder), "--log-format", "json", "--log-interval", "1", *TRAIN)
    path, grown = ("--path", f"{folder}/checkpoint_last.pt"), ("--out", f"{folder}/grown.pt")
    return [
        Command("fairseq-train", (engine, train, ("--max-update", "5", "--no-epoch-checkpoints"))),
        Command("fairseq-eval-lm", (engine, path, ("--gen-subset", "test", "--tokens-per-sample", "16", "--cpu"))),
        Command(
            "alma-grow",
            (
                path,
                grown,
                ("--method", "copy", "--experts", "2", "--noise", "0.1"),
                ("--stream", f"{folder}/S", "--cpu"),
            ),
        ),
    ]


def figures(folder, log):
    """Return all that the commands found, but for times."""
    weights = {name: read_checkpoint(folder / f"{name}.pt")["model"] for name in ("checkpoint_last", "grown")}
    text = log.read_text()
    steps = re.findall(r"train_inner \| (\{.*\})", text)
    losses = [[json.loads(step)[name] for name in ("loss", "balance_loss", "gnorm", "lr")] for step in steps]
    return (
        weights,
        losses,
        re.findall(r"Loss \(base 2\).*", text),
        re.findall(r"^decoder\.layers.*", text, re.MULTILINE),
    )


@pytest.mark.slow
def test_every_figure_is_to_the_last_bit_that_of_new_interpreters(tmp_path, monkeypatch):
    text, stream, found = tmp_path / "text", tmp_path / "S", []
    write_text(text)
    prepare = ["alma-prep-text", str(text), "--out", str(stream), "--megabatches", "2", "--vocab-size", "300"]
    run_script(prepare).check_returncode()
    for forked in (True, False):
        folder = tmp_path / str(forked)
        shutil.copytree(stream, folder / "S")
        if not forked:
            monkeypatch.setattr(process, "is_of_this_python", lambda program, arguments: False)
        for command in commands(folder):
            run_logged(command, folder / "log", lambda line: None)
        found.append(figures(folder, folder / "log"))
    (weights, *others), (expected_weights, *expected) = found
    assert others == expected
    assert [len(figure) for figure in others] == [5, 1, 4]
    for name, tensors in expected_weights.items():
        assert weights[name].keys() == tensors.keys()
        assert all(torch.equal(weights[name][key], tensor) for key, tensor in tensors.items())


def test_only_scripts_of_this_environment_are_forked(tmp_path):
    beside = Path(sys.executable).with_name("fairseq-train")
    assert is_of_this_python(str(beside), [])
    assert not is_of_this_python(sys.executable, [])
    assert not is_of_this_python("/bin/sh", [])
    other = tmp_path / "fairseq-train"
    for first in ("#!/bin/sh", f"#!{tmp_path}/python", "#!/usr/bin/env python3", "", f"x#!{sys.executable}"):
        other.write_text(f"{first}\n")
        assert not is_of_this_python(str(other), []), first
