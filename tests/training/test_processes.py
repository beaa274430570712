"""Rank, world size and device of a stock command, from its options and environment."""

import pytest
import torch

from fairseq_alma.errors import AlmaError
from tests.text.stock_commands import evaluation_config, train_model, training_config

TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


@pytest.fixture
def by_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_a_command_reads_its_rank_from_the_environment_of_torchrun_on_cpus(trained, by_torchrun):
    given = "--ddp-backend", "pytorch_ddp", "--distributed-backend", "nccl"  # need GPUs
    for cfg in (training_config(trained.stream, *given), evaluation_config(trained.stream, trained.checkpoint)):
        place = cfg.distributed_training
        assert (place.distributed_world_size, place.distributed_rank, place.device_id) == (2, 1, 0)
        assert (place.distributed_backend, place.ddp_backend) == ("gloo", "legacy_ddp")
        assert place.distributed_no_spawn and place.distributed_init_method == "env://"


def test_more_processes_than_gpus_are_rejected(trained, by_torchrun, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fairseq-train"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(AlmaError, match="LOCAL_RANK=1: the machine has 1 GPUs"):
        training_config(trained.stream, device=())
    monkeypatch.setenv("SLURM_LOCALID", "1")  # SLURM shows each task its own GPU
    assert training_config(trained.stream, device=()).distributed_training.device_id == 0


def test_the_default_is_one_process_for_any_number_of_gpus_and_cpus_need_torchrun(trained, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fairseq-train", "--distributed-world-size", "2", "--cpu"])
    with pytest.raises(AlmaError, match="--distributed-world-size 2: needs GPUs; on CPUs, use torchrun"):
        training_config(trained.stream)
    monkeypatch.setattr("sys.argv", [*TORCHRUN])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert training_config(trained.stream).distributed_training.distributed_world_size == 1


def test_the_cpu_option_hides_all_gpus(trained, tmp_path, monkeypatch):
    """fairseq computes gradient norms on a visible GPU, and reads its random state."""
    monkeypatch.setattr("sys.argv", ["fairseq-train", "--cpu"])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: len(torch.cuda._parse_visible_devices()[:1]))
    assert torch.cuda.is_available()
    options = ("--megabatch", "0", "--max-update", "1", "--clip-norm", "0.1")
    assert train_model(trained.stream, tmp_path, *options).is_file()
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


@pytest.mark.parametrize("device", [[], ["--cpu"]])
def test_distributed_defaults_follow_the_device(trained, by_torchrun, monkeypatch, device):
    monkeypatch.setattr("sys.argv", ["fairseq-train", *device])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = training_config(trained.stream, device=device).distributed_training
    assert training_config(trained.stream, "--ddp-backend", "slowmo").distributed_training.ddp_backend == "slowmo"
    found = (place.distributed_world_size, place.distributed_backend, place.ddp_backend)
    assert found == ((2, "gloo", "legacy_ddp") if device else (2, "nccl", "pytorch_ddp"))
