"""``--slurm``: the chain, the scripts that are printed anywhere, and a whole run where there is a SLURM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import stages
from fairseq_alma.options import without
from fairseq_alma.runs import slurm_jobs
from fairseq_alma.runs.slurm_jobs import SlurmJob, StreamCall, plan_jobs, read_parameters, require_nodes
from tests.forked import is_alive, wait_until
from tests.images.image_streams import make_stream
from tests.runs.fakes import write_manifest
from tests.runs.runs import plan_learner

TRAIN = ["--arch", "alma_switch_lm_tiny", "--max-update", "10"]
IMAGES = ["--learner", "ens", "--num-members", "2", "--wait", "3"]
WORDS = ["--", "--width", "6", "--max-epoch", "4", "--cpu"]


def chain(learner, num_stages=2, complete=(), **options):
    return plan_jobs(plan_learner(learner, stages(num_stages, 1), **options), complete)


def test_a_single_model_is_a_job_a_stage_each_after_the_one_before():
    assert chain("sm", 3) == [SlurmJob(0, None, ()), SlurmJob(1, None, (0,)), SlurmJob(2, None, (1,))]
    assert [job.after for job in chain("sm", 3, init="scratch")] == [(), (), ()]


def test_each_member_waits_for_its_own_weights_and_the_stage_for_its_members():
    assert chain("ens", num_members=2) == [
        SlurmJob(0, 0, ()),
        SlurmJob(0, 1, ()),
        SlurmJob(0, None, (0, 1)),
        SlurmJob(1, 0, (0,)),
        SlurmJob(1, 1, (1,)),
        SlurmJob(1, None, (2, 3, 4)),
    ]


def test_a_growing_ensemble_waits_for_what_it_predicts_with():
    assert chain("gens") == [SlurmJob(0, None, ()), SlurmJob(1, None, (0,))]
    assert [job.after for job in chain("gens", num_members=2)] == [(), (), (0, 1), (), (), (2, 3, 4)]


def test_complete_stages_have_no_job_and_are_not_waited_for():
    assert chain("sm", 3, complete=[0, 1]) == [SlurmJob(2, None, ())]


@pytest.fixture
def stream(tmp_path):
    return write_manifest(tmp_path / "S", 2).root


def run(stream, tmp_path, *options):
    return main(["--stream", str(stream), "--run", str(tmp_path / "R"), *options, "--", *TRAIN])


def test_a_dry_run_prints_the_script_of_each_job_and_leaves_nothing(stream, tmp_path, capsys):
    pytest.importorskip("submitit")
    slurm = ["--slurm", "partition=gpu", "gpus-per-node=8", "reservation=me", "--num-procs", "1"]
    assert run(stream, tmp_path, "--learner", "ens", *slurm, "--dry-run") == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash")
    assert len(scripts) == 7  # of two members and a stage, twice
    first, fourth, last = scripts[1], scripts[4], scripts[6]
    for option in ("partition=gpu", "gpus-per-node=8", "reservation=me", "time=1440", "requeue", "signal=USR2@90"):
        assert f"#SBATCH --{option}\n" in first
    assert "--dependency" not in first and "#SBATCH --job-name=R-stage-0-member-0\n" in first
    assert "#SBATCH --dependency=afterok:JOB_0\n" in fourth
    assert "#SBATCH --dependency=afterok:JOB_2:JOB_3:JOB_4\n" in last and "kill-on-invalid-dep=yes" in last
    call = re.search(r"# job 4: alma-stream (.*)\n", "".join(scripts))[1]
    assert "--stage 1 --member 1 -- --arch" in call and "--slurm" not in call and "--dry-run" not in call
    assert "--stage 1 --jobs 1 -- --arch" in "".join(scripts)
    assert not (tmp_path / "R").exists()


def test_a_job_asks_for_what_all_its_processes_need(stream, tmp_path, capsys):
    pytest.importorskip("submitit")
    slurm = ["--slurm", "gpus-per-task=a100:1", "cpus-per-task=32", "--num-procs", "8", "--nodes", "2"]
    own = ["--stream", str(stream), "--run", str(tmp_path / "R"), "--learner", "sm", *slurm, "--dry-run"]
    assert main([*own, "--", *TRAIN, "--update-freq", "8"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=a100:4\n" in script and "gpus-per-task" not in script.replace("slurm gpus", "")
    assert re.search(r"srun .*--overlap --nodes=1 --ntasks=1 --cpus-per-task=32", script)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slurm", "partition"], "--slurm partition: an option of sbatch is needed, as partition=gpu"),
        (["--slurm", "setup=evil", "--dry-run"], "--slurm setup=evil: an option of sbatch is needed"),
        (["--slurm", "time=1:00"], "--slurm time=1:00: minutes, a whole number"),
        (["--slurm", "gpus-per-task=all"], "--slurm gpus-per-task=all: GPUs of a process, a whole number"),
        (["--slurm", "nodes=2"], "--slurm nodes=2: alma-stream decides that; --nodes gives"),
        (["--slurm", "--learner", "ens", "--member", "0"], "--slurm makes a job of each member; leave --member out"),
        (["--nodes", "2", "--num-procs", "3"], "--nodes 2: each needs as many processes"),
    ],
)
def test_a_wrong_use_is_one_line(stream, tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        run(stream, tmp_path, *options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_cluster_it_is_said_so(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AlmaError, match=r"--slurm: (sbatch not found.*--dry-run|submitit is not installed)"):
        run(stream, tmp_path, "--slurm")
    assert not (tmp_path / "R").exists()
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(AlmaError, match="--nodes 2: not within an allocation"):
        require_nodes(2)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    require_nodes(2)
    with pytest.raises(AlmaError, match="--nodes 4: the allocation of SLURM has 2"):
        require_nodes(4)


def test_options_are_left_out_with_their_words():
    words = ["--slurm", "a=b", "c=d", "--run", "R", "--stage=1", "--wait", "2"]
    assert without(words, {"--slurm": None, "--stage": 1}) == ["--run", "R", "--wait", "2"]
    assert read_parameters(["mem=4G"]) == {"time": "1440", "mem": "4G"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes ``alma-stream`` a script; a job may leave its own answer to SIGTERM, as its process ends with it."""
    before = signal.getsignal(signal.SIGTERM)

    def write(body):
        path = tmp_path / "alma-stream"
        path.write_text(f"#!{sys.executable} -S\nimport os, sys, time\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(slurm_jobs, "find_program", lambda name: str(path))
        return StreamCall(["--stage", "0"])

    yield write
    signal.signal(signal.SIGTERM, before)


def test_a_job_fails_with_its_command_and_is_queued_again_as_it_is(script):
    script("assert sys.argv[1:] == ['--stage', '0']")()
    with pytest.raises(SystemExit, match=r"alma-stream failed \(exit status 3\)"):
        script("sys.exit(3)")()
    submitit = pytest.importorskip("submitit")
    call = StreamCall(["--stage", "0"])
    again = call.checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission) and again.function is call


def test_a_job_that_is_ended_ends_its_command_which_the_signal_of_submitit_alone_does_not(script, tmp_path):
    call = script(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")

    def end(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, end)
    here = os.getpid()
    signal_all = (
        f"import os, signal, sys, time\npath = {str(tmp_path / 'pid')!r}\n"
        "while not (os.path.exists(path) and open(path).read()): time.sleep(0.05)\n"
        "pid = int(open(path).read())\nos.kill(pid, signal.SIGUSR2); time.sleep(0.3); os.kill(pid, 0)\n"
        f"os.kill({here}, signal.SIGUSR2)"
    )
    other = subprocess.Popen([sys.executable, "-c", signal_all])
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGUSR2, before)
        other.wait()
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_a_job_that_slurm_ends_does_not_fail_but_waits_for_the_end(script, monkeypatch):
    waited = []
    monkeypatch.setattr(slurm_jobs.time, "sleep", waited.append)
    before = signal.getsignal(signal.SIGTERM)
    call = script(f"os.kill({os.getpid()}, 15)\nsys.exit(143)")
    try:
        with pytest.raises(SystemExit, match="exit status 143"):
            call()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert slurm_jobs.GRACE_SECONDS in waited


def has_slurm():
    if shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.skipif(not has_slurm(), reason="needs a SLURM")
def test_a_chain_of_jobs_that_is_requeued_ends_with_the_files_of_a_plain_run(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    stream = make_stream(tmp_path / "S")
    arguments = ["--stream", str(stream), "--run", str(tmp_path / "R"), *IMAGES]
    assert main([*arguments, "--slurm", "time=10", *WORDS]) == 0
    first = json.loads((tmp_path / "R/slurm/submitted.json").read_text())["jobs"][0]
    with pytest.raises(AlmaError, match="are in the queue"):
        main([*arguments, "--slurm", "time=10", *WORDS])
    state = ["squeue", "-h", "-j", first, "-o", "%T"]
    assert wait_until(lambda: subprocess.run(state, capture_output=True, text=True).stdout == "RUNNING\n")
    time.sleep(2)
    subprocess.run(["scontrol", "requeue", first], check=True)
    assert wait_until(lambda: (tmp_path / "R/stage-001/stage.json").exists()), state
    assert main([*arguments[:3], str(tmp_path / "plain"), *IMAGES, "--jobs", "1", *WORDS]) == 0
    for name in ("stage-000", "stage-001"):
        found, plain = (json.loads((tmp_path / run / name / "stage.json").read_text()) for run in ("R", "plain"))
        assert {**found, "wall_seconds": 0} == {**plain, "wall_seconds": 0}
