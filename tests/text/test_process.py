import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.terminal import LiveLine
from fairseq_alma.text.process import Command, _over_nodes, parse_log_line, run_logged, watch_fairseq
from fairseq_alma.watch.progress import StageProgress
from tests.forked import is_alive, wait_until


def python(code, *arguments):
    return Command(os.path.basename(sys.executable), (("-c", code), arguments))


def test_a_command_is_spelled_for_the_shell_in_lines_of_bearable_length():
    command = Command(
        "fairseq-train", (("S T",), ("--betas", "(0.9, 0.98)"), *((f"--option-{i}", "x" * 20) for i in range(9)))
    )
    lines = str(command).split(" \\\n")
    assert lines[0] == "fairseq-train"
    assert max(map(len, lines)) < 115
    assert shlex.split(str(command).replace("\\\n", " "))[1:] == command.arguments


def test_all_output_goes_to_the_log_after_what_was_there_and_is_watched(tmp_path):
    log, seen = tmp_path / "x" / "a.log", []
    for word in ("one", "two"):
        run_logged(python(f"import sys; print('{word}'); sys.stderr.write('{word} aside')"), log, seen.append)
    content = log.read_text()
    assert content.count("$ ") == 2
    assert content.index("one aside") < content.index("two")
    assert "one" in seen and "two" in seen


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('fine so far', flush=True); raise ValueError('no such thing')",
            r"status 1\): ValueError: no such thing",
        ),
        ("raise SystemExit('stream.json: not there')", r"\(exit status 1\): stream.json: not there"),
        ("raise SystemExit('invalid choice: ' + 'x' * 9999)", r"invalid choice: x+…$"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, perhaps out of memory"),
    ],
)
def test_a_failure_names_the_log_and_the_reason_in_a_bearable_length(code, said, tmp_path):
    with pytest.raises(AlmaError, match=rf"a.log: python\S* failed .*{said}") as raised:
        run_logged(python(code), tmp_path / "a.log", lambda line: None)
    assert len(str(raised.value)) < 700


def test_a_command_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(AlmaError, match="fairseq-nothing: command not found"):
        run_logged(Command("fairseq-nothing", ()), tmp_path / "a.log", lambda line: None)


RUNNER = """
import signal, sys
from pathlib import Path
from fairseq_alma.text.process import Command, run_logged
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
run_logged(Command(Path(sys.executable).name, (("-c", code),)), Path(sys.argv[1]), lambda line: None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_child_dies_with_its_parent(tmp_path, number):
    log = tmp_path / "a.log"
    parent = subprocess.Popen([sys.executable, "-c", RUNNER, str(log)], stderr=subprocess.DEVNULL)
    pattern = re.compile(r"^pid (\d+)$", re.MULTILINE)
    assert wait_until(lambda: log.exists() and pattern.search(log.read_text()))
    child = int(pattern.search(log.read_text())[1])
    assert is_alive(child)
    parent.send_signal(number)
    parent.wait(timeout=600)
    assert wait_until(lambda: not is_alive(child))


def test_a_command_has_its_variables_beside_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    code = "import os; print(os.environ['OURS'], os.environ['ITS'])"
    command = Command(os.path.basename(sys.executable), (("-c", code),), {"ITS": "a b"})
    run_logged(command, tmp_path / "log", lambda line: None)
    assert (tmp_path / "log").read_text().endswith("\n1 a b\n")
    assert str(command).startswith("ITS='a b' python")


TOGETHER = """
import os, signal, sys, time
from pathlib import Path
how, rank, folder = sys.argv[1], os.environ["RANK"], Path(sys.argv[2])
def wait(condition):
    while not condition():
        time.sleep(0.02)
def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")), flush=True)
print("port", os.environ["MASTER_PORT"], "pid", os.getpid(), flush=True)
(folder / f"{rank} {os.getpid()}").touch()
wait(lambda: len(list(folder.iterdir())) == int(os.environ["WORLD_SIZE"]))
if how == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "killed" and rank == "0":
    (other,) = folder.glob("1 *")
    wait(lambda: has_ended(other.name[2:]))
    sys.exit("another one has died")
if how == "deaf" and rank == "0":
    sys.exit(3)
if how != "well":
    wait(lambda: False)
"""


def run_together(log, how, num_procs=3):
    folder = log.with_name("begun")
    folder.mkdir()
    command = python(TOGETHER, how, str(folder))
    run_logged(Command(command.program, command.groups, num_procs=num_procs), log, lambda line: None)


def test_several_processes_have_the_variables_of_torchrun(tmp_path):
    run_together(tmp_path / "log", "well")
    text = (tmp_path / "log").read_text()
    assert sorted(re.findall(r"^(\d) (\d) 3 localhost$", text, re.MULTILINE)) == [("0", "0"), ("1", "1"), ("2", "2")]
    assert len(set(re.findall(r"port (\d+)", text))) == 1


@pytest.mark.parametrize("words", [["--cpu"], []], ids=["without GPUs", "with them"])
def test_a_shell_starts_several_processes_as_they_are_run_each_by_itself(words):
    command = Command("fairseq-train", (("S", *words),), num_procs=2)
    place = "MASTER_ADDR=localhost MASTER_PORT=29500 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 OMP_NUM_THREADS=1"
    assert str(command).startswith(f"for RANK in 0 1; do {place} RANK=$RANK LOCAL_RANK=$RANK fairseq-train ")
    assert str(command).endswith(" & done; wait")


def test_over_nodes_each_process_gets_its_share_of_the_cpus(tmp_path, monkeypatch):
    """srun gives a task one CPU, unless it is told: it takes the number from no allocation."""
    command = Command("fairseq-train", (("S",),), num_procs=4, nodes=2)
    assert "--cpus-per-task=$((SLURM_CPUS_ON_NODE / 2)) bash -c 'RANK=$SLURM_PROCID" in str(command)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "24")
    (words, *_) = _over_nodes(command).groups
    assert "--cpus-per-task=12" in words and words[-2] == "-" and words[-3].endswith('exec "$@"')


def test_when_one_of_several_is_killed_all_end_and_it_is_named(tmp_path, monkeypatch):
    log, now = tmp_path / "log", itertools.count()

    def monotonic():  # stands still until the last words, of however slow a process
        return next(now) if "another one" in log.read_text() else 0

    monkeypatch.setattr("fairseq_alma.text.process.time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(AlmaError, match=r"process 1, ended by SIGKILL, .*\): another one has died"):
        run_together(log, "killed")
    assert not any(is_alive(int(pid)) for pid in re.findall(r"pid (\d+)", log.read_text()))


def test_who_does_not_listen_is_killed_when_another_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("fairseq_alma.runs.workers.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("fairseq_alma.text.process.LAST_WORDS_SECONDS", 0.3)
    log = tmp_path / "log"
    with pytest.raises(AlmaError, match=r"\(process 0, exit status 3\)"):
        run_together(log, "deaf", 2)
    assert not any(is_alive(int(pid)) for pid in re.findall(r"pid (\d+)", log.read_text()))


LINE = (
    '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.25, "loss": "7.1", "nll_loss": "7.012", '
    '"wps": "1234.5", "num_updates": "40"}'
)


def test_figures_are_read_from_fairseqs_lines_and_from_no_others():
    assert parse_log_line(LINE)["num_updates"] == "40"
    assert parse_log_line("2026-01-01 | INFO | fairseq_cli.train | {'a': 1}") is None
    assert parse_log_line("2026-01-01 | INFO | train_inner | {broken") is None
    assert parse_log_line("") is None


def test_bits_per_token_and_words_per_second_are_shown(capsys):
    progress = StageProgress("s", "word", 120, line=LiveLine(every=0.0))
    watch = watch_fairseq(progress, words_per_token=0.5)
    watch("nothing of interest")
    watch(LINE)
    assert capsys.readouterr().err.splitlines()[1:] == ["s: 40/120 updates, loss 7.012 bits, 617 words/s"]


@pytest.mark.parametrize(("max_update", "max_epoch", "expected"), [(None, 2, 320), (100, 2, 100), (400, 2, 320)])
def test_updates_are_counted_from_epochs_where_epochs_end_the_training(max_update, max_epoch, expected):
    progress = StageProgress("s", "word", max_update)
    watch_fairseq(progress, 1.0, max_epoch)(LINE)
    assert progress.max_update == expected
