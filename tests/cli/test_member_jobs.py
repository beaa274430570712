"""``--jobs`` with a fast script in place of ``alma-stream --member``."""

import json
import os
import sys
import textwrap
from functools import partial

import pytest

from fairseq_alma.cli import stream as module
from fairseq_alma.cli.stream import MemberJobs, devices_of_jobs
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.run_folder import RunFolder
from tests.forked import is_alive
from tests.runs.fakes import FakeBackend
from tests.runs.runs import make_plans

SCRIPT = """\
#!{python} -S
import json, os, sys, time
words = sys.argv[1:sys.argv.index("--")]
members = [int(word) for word in words[words.index("--member") + 1:]]
open(f"{folder}/{{members[0]}}.json", "w").write(json.dumps([sys.argv[1:], os.getpid(), os.environ.get("DEVICE")]))
{body}
"""
WORDS = (["--stream", "S", "--jobs", "2", "--run", "R"], ["--cpu"])


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Return a function that starts jobs with a script."""

    def build(body, num_members=3):
        script = tmp_path / "alma-stream"
        script.write_text(SCRIPT.format(python=sys.executable, folder=tmp_path, body=textwrap.dedent(body)))
        script.chmod(0o755)
        monkeypatch.setattr(module, "ALMA_STREAM", (str(script),))
        run = Run(RunFolder(tmp_path / "R"), make_plans(2, num_members=num_members), None)
        is_trained = partial(run.is_member_trained, backend=FakeBackend(lost=[ModelId(0, 1)]))
        return MemberJobs(WORDS, is_trained, run.plans, [{"DEVICE": "0"}, {"DEVICE": "1"}])

    return build


def begun(folder):
    """Return the words, process number and device of each process, by its first member."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_each_process_trains_its_members_on_its_own_device(jobs, tmp_path):
    with jobs("") as running:
        running.await_models(make_plans(1, num_members=3)[0])
    calls = {first: (words, device) for first, (words, _, device) in begun(tmp_path).items()}
    begin = ["--stream", "S", "--run", "R", "--member"]
    assert calls == {0: ([*begin, "0", "2", "--", "--cpu"], "0"), 1: ([*begin, "1", "--", "--cpu"], "1")}


def test_there_are_at_most_as_many_processes_as_members_and_an_outdated_member_is_awaited(jobs, tmp_path):
    for member in range(2):
        RunFolder(tmp_path / "R").start_clock(0, member).stop()
    with jobs("sys.exit('training again')", num_members=2) as running, pytest.raises(AlmaError, match="training again"):
        running.await_models(make_plans(1, num_members=2)[0])
    with jobs("time.sleep(600)", num_members=1) as running:
        running.await_models(make_plans(1)[0])
        assert len(running.jobs) == 1
    assert running.jobs[0][0].returncode is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('note\\nmember-1.log: fairseq-train failed')", "^member-1.log: fairseq-train failed$"),
        ("os.kill(os.getpid(), 9)", r"exit status -9.*repeat the command"),
    ],
)
def test_a_failed_process_is_reported_and_ends_the_others(body, message, jobs, tmp_path):
    with pytest.raises(AlmaError, match=message), jobs(f"if 1 in members: {body}\ntime.sleep(600)") as running:
        running.await_models(make_plans(1, num_members=3)[0])
    assert not any(is_alive(pid) for _, pid, _ in begun(tmp_path).values())
    assert os.getpid() not in [pid for _, pid, _ in begun(tmp_path).values()]


def test_each_job_has_its_own_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert devices_of_jobs(2, 2, False) == [{"CUDA_VISIBLE_DEVICES": "3,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert devices_of_jobs(2, 1, True) == [{}, {}]
    with pytest.raises(AlmaError, match=r"--jobs 3, --num-procs 2: expected 6 visible GPUs, found 4; .*--jobs 2$"):
        devices_of_jobs(3, 2, False)
    with pytest.raises(AlmaError, match=r"at most --num-procs 4$"):
        devices_of_jobs(1, 8, False)
