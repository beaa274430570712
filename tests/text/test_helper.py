"""The helper process: environment, values and failures of its children."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.text import helper
from fairseq_alma.text.helper import call
from tests.engine import REAL_HELPER
from tests.forked import is_alive, wait_until


@pytest.fixture(scope="module", autouse=True)
def real_helper():
    """Use the real helper; other tests fork commands from their own process."""
    with pytest.MonkeyPatch.context() as patch:
        helper.close()
        patch.setattr(helper, "Helper", REAL_HELPER)
        yield
        helper.close()


def test_a_child_returns_a_value_and_its_output_is_in_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    assert call("builtins:print", "hello", log=log) is None
    assert log.read_text() == "before\nhello\n" and call("math:hypot", 3, 4) == 5.0


def test_the_helper_has_one_thread_no_cuda_and_no_placeholder_of_a_module():
    assert call("builtins:eval", "__import__('scipy.stats').stats.norm.cdf(0)") == 0.5
    assert call("builtins:eval", "len(__import__('os').listdir(f'/proc/{__import__(\"os\").getppid()}/task'))") == 1
    assert call("builtins:eval", "__import__('torch').cuda.is_initialized()") is False


def test_a_child_has_the_variables_and_the_working_directory_of_its_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("ALMA_X", "y")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working directory')")
    assert call("os:getenv", "ALMA_X") == "y" and call("os:getcwd") == str(tmp_path)
    assert call("os:getenv", "ALMA_Y", environment={"ALMA_Y": "z", "OMP_NUM_THREADS": "0"}) == "z"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "(log|full): builtins:eval failed: ZeroDivisionError: division by zero"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "ended by a signal, possibly out of memory"),
        ("exit('bad.txt: no text found')", "failed: bad.txt: no text found"),
    ],
)
def test_a_failure_is_one_line_with_its_log(expression, message, tmp_path):
    for log in (tmp_path / "log", "/dev/full"):  # also if the disk is full
        with pytest.raises(AlmaError, match=message):
            call("builtins:eval", expression, log=log)


def test_the_cpu_time_of_the_last_child_counts_for_the_command():
    used = call("builtins:eval", "(sum(range(3 * 10**7)), __import__('time').process_time())[1]")
    stat = Path(f"/proc/{helper._helper.process.pid}/stat").read_text().split()  # field 14: CPU time of the helper
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime + int(stat[13]) / os.sysconf("SC_CLK_TCK")
    helper.close()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before > used / 2 > 0.1


def test_processes_of_a_group_know_their_ranks_and_one_failure_ends_all(tmp_path):
    expression = "int(__import__('os').environ['RANK']) + 10 * int(__import__('os').environ['WORLD_SIZE'])"
    assert call("builtins:eval", expression, num_procs=2) == 20
    wait_or_fail = "__import__('time').sleep(600) if __import__('os').environ['RANK'] == '0' else 1 / 0"
    began = time.monotonic()
    with pytest.raises(AlmaError, match="rank 1: ZeroDivisionError"):
        call("builtins:eval", wait_or_fail, num_procs=2, log=tmp_path / "log")
    assert time.monotonic() - began < 300


@pytest.mark.slow
def test_helper_and_children_end_with_their_parent(tmp_path):
    pids = tmp_path / "pids"
    body = f"import os, time; open({str(pids)!r}, 'w').write('%d %d' % (os.getpid(), os.getppid())); time.sleep(600)"
    code = f"from fairseq_alma.text.helper import call; call('builtins:exec', {body!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        os.kill(parent.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_a_failed_import_is_one_line_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for code, message in (
        (
            "raise ImportError('no extension')",
            r"fairseq cannot be imported \(ImportError: no extension\); free memory or reinstall",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "helper process was killed, possibly out of memory; run the command again",
        ),
    ):
        helper.close()
        (tmp_path / "fairseq_cli.py").write_text(code)
        with pytest.raises(AlmaError, match=message):
            call("math:hypot", 3, 4)
