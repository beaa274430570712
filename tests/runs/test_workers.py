"""Processes for some members each: a script stands for ``alma-stream --member``, so that all of it takes no seconds."""

import json
import os
import signal
import sys
import textwrap

import pytest
import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs import workers as module
from fairseq_alma.runs.workers import MemberWorkers, devices_of_jobs
from tests.forked import is_alive, wait_until
from tests.runs.runs import make_plans

SCRIPT = """\
#!{python} -S
import json, os, sys, time
def tell(**message):
    os.write(int(words[words.index("--progress-to") + 1]), (json.dumps(message) + chr(10)).encode())
words = sys.argv[1:sys.argv.index("--")]
members = [int(word) for word in words[words.index("--member") + 1:]]
open(f"{folder}/{{members[0]}}.json", "w").write(json.dumps([sys.argv[1:], os.getpid(), os.environ.get("DEVICE")]))
{body}
"""
WORDS = (["--stream", "S", "--jobs", "2", "--run", "R"], ["--cpu"])
TRAIN = """
for stage in range(2):
    for member in members:
        tell(text=f"stage {stage}, member {member}: 1/2 updates", brief=f"{member}: 1/2", done=1, total=2)
        tell(trained=[stage, member])
"""
FOREVER = 'tell(text="long", brief=f"{members[0]}: 1/9", done=1, total=9)\ntime.sleep(600)\n'


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Builds them for a script that does something."""

    def build(body, num_members=3, environments=({"DEVICE": "0"}, {"DEVICE": "1"}), group_size=1):
        script = tmp_path / "alma-stream"
        script.write_text(SCRIPT.format(python=sys.executable, folder=tmp_path, body=textwrap.dedent(body)))
        script.chmod(0o755)
        monkeypatch.setattr(module, "find_program", lambda name: str(script))
        return MemberWorkers(WORDS, make_plans(2, num_members=num_members), environments, group_size)

    return build


def begun(folder):
    """Return what each process noted as it began."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_each_process_is_a_call_for_some_members_on_its_own_device(workers, tmp_path):
    with workers(TRAIN) as running:
        for plan in make_plans(2, num_members=3):
            running.await_models(plan)
    calls = begun(tmp_path)
    assert {first: (words[-4:], device) for first, (words, _, device) in calls.items()} == {
        0: (["0", "2", "--", "--cpu"], "0"),
        1: (["--member", "1", "--", "--cpu"], "1"),
    }
    assert all("--jobs" not in words and words[:4] == ["--stream", "S", "--run", "R"] for words, _, _ in calls.values())


def test_members_that_are_trained_together_are_dealt_together(workers, tmp_path):
    with workers(TRAIN, num_members=5, group_size=2) as running:
        for plan in make_plans(2, num_members=5):
            running.await_models(plan)
    assert running.shares == [[0, 1, 4], [2, 3]]
    assert {first: words[words.index("--member") + 1 : -2] for first, (words, *_) in begun(tmp_path).items()} == {
        0: ["0", "1", "4"],
        2: ["2", "3"],
    }


def test_no_more_processes_than_members_are_begun(workers, tmp_path):
    with workers(TRAIN, num_members=1) as running:
        running.await_models(make_plans(1)[0])
    assert list(begun(tmp_path)) == [0]


def test_nothing_is_begun_before_models_are_needed_and_what_was_there_is_not_waited_for(workers, tmp_path):
    with workers("") as running:
        assert begun(tmp_path) == {}
        running.await_models(make_plans(1, num_members=3)[0])
    assert set(begun(tmp_path)) == {0, 1}


def test_an_error_in_one_member_is_the_line_and_ends_the_others(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.1)
    body = "if 1 in members: sys.exit('note\\nmember-1.log: fairseq-train failed')\n" + FOREVER
    with pytest.raises(AlmaError) as raised, workers(body) as running:
        running.await_models(make_plans(1, num_members=3)[0])
    assert str(raised.value) == "member-1.log: fairseq-train failed"
    assert not any(is_alive(pid) for _, pid, _ in begun(tmp_path).values())


def test_a_process_that_is_killed_is_named_by_its_members(workers):
    body = "if 0 in members: os.kill(os.getpid(), 9)\nsys.exit('lost the other')"
    said = r"process of member 0, 2 failed \(ended by SIGKILL.*the same command resumes"
    with pytest.raises(AlmaError, match=said), workers(body) as running:
        running.await_models(make_plans(1, num_members=3)[0])


def test_the_line_shows_all_members_that_are_trained(workers, tmp_path, capsys, monkeypatch):
    body = """
    tell(text="long", brief=f"{members[0]}: 1/9", done=1, total=9)
    for _ in range(6000):
        if os.path.exists(os.path.dirname(__file__) + "/shown"):
            sys.exit("over")
        time.sleep(0.01)
    """
    with pytest.raises(AlmaError, match="over"), workers(body) as running:
        running.line.every = 0
        show = running.line.show

        def show_and_note(text, *others):
            show(text, *others)
            if ";" in text:
                (tmp_path / "shown").touch()

        monkeypatch.setattr(running.line, "show", show_and_note)
        running.await_models(make_plans(1, num_members=2)[0])
    assert "0: 1/9; 1: 1/9" in capsys.readouterr().err.splitlines()


def test_all_processes_end_with_the_one_that_began_them(workers, tmp_path):
    running = workers(FOREVER)
    parent = os.fork()
    if parent == 0:
        with running:
            running.await_models(make_plans(1, num_members=2)[0])
        os._exit(0)
    try:
        assert wait_until(lambda: set(begun(tmp_path)) == {0, 1})
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert wait_until(lambda: not any(is_alive(pid) for _, pid, _ in begun(tmp_path).values()))


@pytest.mark.parametrize(
    ("visible", "jobs", "procs", "expected"),
    [
        (None, 2, 2, ["0,1", "2,3"]),
        ("3,5", 2, 1, ["3", "5"]),
    ],
)
def test_each_job_has_devices_of_its_own(visible, jobs, procs, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if visible is None else len(visible.split(",")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = devices_of_jobs(jobs, procs, is_on_cpu=False)
    assert found == [{"CUDA_VISIBLE_DEVICES": devices} for devices in expected]
    assert devices_of_jobs(jobs, procs, is_on_cpu=True) == [{}, {}]


def test_jobs_that_do_not_fit_the_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(AlmaError, match=r"--jobs 3 with --num-procs 2: 6 GPUs are needed, 4 are visible; .*--jobs 2"):
        devices_of_jobs(3, 2, is_on_cpu=False)
