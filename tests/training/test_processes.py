"""How a stock command finds out that it is one of several, and what it says when it loses the others."""

import io
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fairseq_alma.errors import AlmaError
from fairseq_alma.text import process
from fairseq_alma.text.process import Command, run_logged
from fairseq_alma.training import processes
from fairseq_alma.training.processes import ProcessWatch, explain
from tests.forked import PATIENCE, is_alive, start, together, wait_until
from tests.text.stock_commands import evaluation_config, train_model, training_config

TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
TORCHRUN["LOCAL_WORLD_SIZE"] = "2"


@pytest.fixture
def by_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_under_torchrun_on_a_cpu_a_command_takes_its_place_from_the_environment(trained, by_torchrun):
    for cfg in (training_config(trained.stream), evaluation_config(trained.stream, trained.checkpoint)):
        place = cfg.distributed_training
        assert (place.distributed_world_size, place.distributed_rank, place.device_id) == (2, 1, 0)
        assert (place.distributed_backend, place.ddp_backend) == ("gloo", "legacy_ddp")
        assert place.distributed_no_spawn and place.distributed_init_method == "env://"


def test_what_is_given_counts_more_than_the_environment(trained, by_torchrun):
    place = training_config(trained.stream, "--ddp-backend", "slowmo").distributed_training
    assert place.ddp_backend == "slowmo"


def test_more_processes_than_gpus_are_refused(trained, by_torchrun, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fairseq-train"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as silent:  # the other processes leave it to the first to say why
        training_config(trained.stream, device=())
    assert silent.value.code == 1
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(AlmaError, match="2 processes on a machine with 1 GPUs"):
        training_config(trained.stream, device=())


def test_a_task_of_slurm_that_sees_one_gpu_has_it_for_itself(trained, by_torchrun, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert training_config(trained.stream, device=()).distributed_training.device_id == 0


def test_under_cpu_a_process_sees_no_gpu(trained, tmp_path, monkeypatch):
    """fairseq moves gradients' norms to a GPU wherever it sees one, and asks it for its random numbers."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)  # however often it is asked
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: len(torch.cuda._parse_visible_devices()[:1]))
    assert torch.cuda.is_available()
    options = ("--megabatch", "0", "--max-update", "1", "--clip-norm", "0.1")
    assert train_model(trained.stream, tmp_path, *options).is_file()
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


@pytest.mark.parametrize("device", [[], ["--cpu"]])
def test_a_cpu_beside_gpus_takes_what_works_there(trained, by_torchrun, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = training_config(trained.stream, device=device).distributed_training
    found = (place.distributed_world_size, place.distributed_backend, place.ddp_backend)
    assert found == ((2, "gloo", "legacy_ddp") if device else (2, "nccl", "pytorch_ddp"))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1436.", "has died"),
        (
            "The server socket has failed to listen … name: EADDRINUSE, message: address already in use",
            "port .* in use",
        ),
        ("world size is 9 but have 8 available devices", "more processes than GPUs"),
        ("Trying to use an uninitialized 'dummy' batch.", "fewer batches than processes"),
        ("NCCL communicator was aborted on rank 0.", "^NCCL: NCCL communicator was aborted .* has died"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:3356, invalid usage (run with …), NCCL version 2.27.5\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 53000",
            "^NCCL: ncclInvalidUsage: .* library. Duplicate GPU detected : rank 1 and rank 0 both on .* 53000;",
        ),
        ("Must specify batch size either with --max-tokens or --batch-size", "^--batch-size: no size"),
        (
            "-- Process 1 terminated …\nfairseq_alma.errors.AlmaError: --wait 0: give 1 or more\n",
            "^--wait 0: give 1 or more$",
        ),
    ],
)
def test_what_torch_and_fairseq_say_becomes_one_line(text, meaning):
    assert re.search(meaning, explain(text))


def test_other_errors_are_shown_as_they_are(capsys):
    assert explain("mat1 and mat2 shapes cannot be multiplied") is None
    for alone in (ValueError("of something else"), OSError("timed out")):
        processes.report_in_one_line(type(alone), alone, None)
        assert f"{type(alone).__name__}: {alone}" in capsys.readouterr().err


def test_other_errors_of_a_process_among_several_are_shown_before_it_ends(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(processes, "end_process", lambda: ended.append(True))
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # what torch does
    processes.report_in_one_line(ValueError, ValueError("of something else"), None)
    assert ended and "ValueError: of something else" in capfd.readouterr().err


class Store(dict):
    """What the store of a group does, in one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]


def test_a_process_that_falls_silent_ends_the_others_and_one_that_works_does_not(monkeypatch, capfd):
    now, ended, store, last = [0.0], [], Store(), 3 * processes.SILENCE_SECONDS

    def sleep(seconds):
        now[0] += seconds
        if now[0] < last:
            store.set("beat/1", str(now))
        watch._beat(0)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    watch = ProcessWatch(store, 0, 2, lambda: ended.append(now[0]))
    watch._listen()
    assert 0 <= ended[0] - last - processes.SILENCE_SECONDS < 2 * processes.BEAT_SECONDS
    assert "process 1 of this run does not answer" in capfd.readouterr().err


def test_one_line_comes_from_the_first_process_or_from_one_that_is_left(monkeypatch):
    all_live, first_is_gone = Store(), Store()
    assert [processes.speaks_for_all(all_live, rank) for rank in range(4)] == [True, False, False, False]
    monkeypatch.setattr(processes, "FIRST_SPEAKS_SECONDS", 0.1)
    assert [processes.speaks_for_all(first_is_gone, rank) for rank in (2, 1, 3)] == [True, False, False]


def test_where_the_store_went_with_the_first_process_one_of_each_machine_speaks(monkeypatch):
    class GoneStore(Store):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setenv("MASTER_PORT", f"of test {os.getpid()}")
    monkeypatch.setattr(processes, "CLAIMS", [])
    assert [processes.speaks_for_all(GoneStore(), rank) for rank in (3, 2)] == [True, False]
    processes.CLAIMS.clear()  # as if the process had ended
    assert processes.speaks_for_all(GoneStore(), 2)


def test_of_several_silent_processes_the_first_that_is_not_tells(capfd):
    for rank in (2, 3):
        ProcessWatch(Store(), rank, 4)._report([0, 1])
    assert capfd.readouterr().err.count("process 0, 1 of this run does not answer") == 1


def test_who_finds_no_group_in_time_ends(monkeypatch, capfd):
    monkeypatch.setattr(processes, "JOIN_SECONDS", 0.2)
    ended = threading.Event()
    processes.require_joining(ended.set)
    assert ended.wait(PATIENCE)
    assert "no process group after" in capfd.readouterr().err


def compare(rank, folder, fingerprints):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=len(fingerprints))
    try:
        processes.prepare_group({"S/stream.json": fingerprints[rank]})
    except SystemExit as end:
        return str(end) if isinstance(end, AlmaError) else end.code
    return None


def test_processes_with_other_data_are_refused_in_one_line_of_the_first(tmp_path):
    (first, *others), _ = together(3, compare, tmp_path, ["a", "a", "b"])
    assert first == "S/stream.json: process 2 has b, process 0 has a; all need the same"
    assert others == [1, 1]


def test_processes_with_the_same_data_go_on(tmp_path):
    assert together(2, compare, tmp_path, ["a", "a"])[0] == [None, None]


def stop_and_wait(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    processes.BEAT_SECONDS, processes.SILENCE_SECONDS = 0.1, 2.0
    processes.watch_processes()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def test_a_process_that_hangs_is_noticed_by_the_one_that_waits_for_it(tmp_path, capfd):
    running = start(2, stop_and_wait, tmp_path)
    try:
        running[0][0].join(PATIENCE)
        assert running[0][0].exitcode == 1
    finally:
        for process, _ in running:
            process.kill()


@pytest.mark.parametrize("killed", [1])
@pytest.mark.slow
def test_a_training_that_loses_a_process_ends_in_one_line_and_resumes_with_another_number(
    trained, tmp_path, checkout, killed, monkeypatch
):
    """The stock commands, as ``alma-stream --num-procs`` runs them."""
    monkeypatch.setattr(process, "begin_forked", lambda *_: None)  # each has a command line, by which it is found
    cfg = ["--tokens-per-sample", "32", "--cpu", "--num-workers", "0"]
    here = [str(trained.stream), "--user-dir", str(checkout / "fairseq_alma"), "--task", "alma_lm", *cfg]
    model = ["--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--dropout", "0"]
    model += ["--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2", "--optimizer", "adam", "--lr", "0.01"]
    words = [*here, *model, "--criterion", "alma_switch_cross_entropy", "--megabatch", "1", "--wait", "2"]
    words += ["--batch-size", "4", "--disable-validation", "--no-epoch-checkpoints", "--log-format", "json"]
    words += ["--save-interval-updates", "5", "--keep-interval-updates", "1", "--save-dir", str(tmp_path / "model")]

    def run(program, log, num_procs, *options, watch=lambda line: None):
        command = Command(program, ((*(words if program == "fairseq-train" else here), *options),), num_procs=num_procs)
        run_logged(command, tmp_path / log, watch)

    def kill(line):
        if "Saved checkpoint" in line:
            for pid in processes_of(str(tmp_path / "model"), killed):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(AlmaError, match=r"process 1, ended by SIGKILL.*another process of this run has died") as raised:
        run("fairseq-train", "cut", 2, "--update-freq", "1", "--max-update", "100000", watch=kill)
    assert "\n" not in str(raised.value)
    assert wait_until(lambda: not processes_of(str(tmp_path / "model")))
    checkpoint = torch.load(tmp_path / "model/checkpoint_last.pt", weights_only=True)
    done = checkpoint["optimizer_history"][-1]["num_updates"]
    run("fairseq-train", "resumed", 1, "--update-freq", "2", "--max-update", str(done + 2))
    assert f"@ {done} updates" in (tmp_path / "resumed").read_text()
    lines = []
    for number in (1, 2):
        options = ["--path", str(tmp_path / "model/checkpoint_last.pt"), "--gen-subset", "test"]
        run("fairseq-eval-lm", f"test-{number}", number, *options)
        lines.append(re.findall(r"Loss \(base 2\).*", (tmp_path / f"test-{number}").read_text()))
    assert len(lines[0]) == 1 and lines[0] == lines[1]  # of two processes the first alone prints


def processes_of(word, rank=None):
    """Return the ids of running commands with a word on their line, all or those of one rank."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, environment = ((entry / name).read_text().split("\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if word in line and is_alive(int(entry.name)) and (rank is None or f"RANK={rank}" in environment):
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such call")
@pytest.mark.slow
def test_memory_that_was_freed_is_not_asked_for_again():
    rounds = """
import resource
import torch
from fairseq_alma.training.processes import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)  # more than what the C library keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), sum(faults() for _ in range(40)))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    for more, keeps in (({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)):
        done = subprocess.run(
            [sys.executable, "-c", rounds], capture_output=True, text=True, check=True, env={**environment, **more}
        )
        first, later = map(int, done.stdout.split()[-2:])
        # each of forty rounds clears fresh memory, or some do until the heap has a place that nothing small is put into
        assert (later < 15 * first) == keeps
