"""Data-parallel training equals training by one process up to rounding."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from fairseq import tasks
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train
from torch.nn.parallel import DistributedDataParallel

from tests.forked import group_options, together
from tests.text.stock_commands import training_config

PROCESSES = (1, 2, 4)
# 62 batches of 3 per epoch: the last update of an epoch has two batches instead of four; 30 updates take two epochs.
TRAINING = ("--megabatch", "1", "--wait", "2", "--batch-size", "3", "--dropout", "0", "--max-update", "30")
# With a small epsilon, Adam turns a gradient of rounding errors into a full step.
TRAINING += ("--adam-eps", "1e-4")
SPEEDS = ("wps", "ups", "wall", "train_wall")


def train_rank(rank, num_processes, folder, stream, *arguments):
    words = ["--update-freq", str(4 // num_processes), "--save-dir", str(folder / f"model-{num_processes}"), *arguments]
    words += ["--log-format", "json", "--log-interval", "1", "--log-file", str(folder / f"log-{num_processes}-{rank}")]
    words += group_options(num_processes, rank, folder)
    distributed_utils.call_main(training_config(stream, *TRAINING, *words), train.main)


def train_together(num_processes, folder, stream, *arguments):
    """Return the logged figures of each update, and the checkpoint."""
    together(num_processes, train_rank, num_processes, folder, stream, *arguments)
    log = (folder / f"log-{num_processes}-0").read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith('{"epoch": ') and '"num_updates": ' in line]
    updates = {line["num_updates"]: line for line in lines}.values()
    figures = [{key: float(value) for key, value in line.items() if key not in SPEEDS} for line in updates]
    return figures, torch.load(folder / f"model-{num_processes}" / "checkpoint_last.pt")


@pytest.fixture(scope="module")
def trainings(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainings")
    return functools.cache(lambda number: train_together(number, folder, trained.stream))


def weights(checkpoint):
    return torch.cat([tensor.flatten() for tensor in checkpoint["model"].values()])


def test_two_processes_learn_and_log_the_same_as_one(trainings):
    (alone, one), (shared, several) = trainings(1), trainings(2)
    assert len(alone) == len(shared) == 30
    assert {"balance_loss", "switch0_dropped", "switch0_expert00", "switch0_entropy", "gnorm"} <= set(alone[0])
    for here, there in zip(alone, shared, strict=True):  # printed counts are equal; losses have 3 decimals
        assert there == pytest.approx(here, rel=2e-3, abs=2e-3)
    assert max(figures["switch0_dropped"] for figures in shared) > 0.1  # capacity applies to a batch on any process
    assert torch.allclose(weights(one), weights(several), atol=1e-3)
    counts = [each["extra_state"]["AlmaLMTask"]["train_tokens"] for each in (one, several)]
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_a_training_resumes_with_another_number_of_processes_and_reads_the_same_batches(trained, trainings, tmp_path):
    train_together(2, tmp_path, trained.stream, "--max-update", "7")
    (tmp_path / "model-2").rename(tmp_path / "model-1")
    figures, checkpoint = train_together(1, tmp_path, trained.stream)
    through, whole = trainings(1)
    assert [line["num_updates"] for line in figures] == list(range(8, 31))
    for here, there in zip(through[7:], figures, strict=True):
        assert {key: there[key] for key in ("wpb", "bsz")} == {key: here[key] for key in ("wpb", "bsz")}
    assert torch.allclose(weights(whole), weights(checkpoint), atol=1e-3)
    counts, through = (each["extra_state"]["AlmaLMTask"] for each in (checkpoint, whole))
    assert counts["train_tokens"] == through["train_tokens"]
    assert [(each["from_update"], each["num_procs"]) for each in counts["batches"]] == [(0, 2), (7, 1)]


def gradient_rank(rank, num_processes, folder, stream):
    """Return the gradient of four batches distributed over processes by torch's data-parallel wrapper."""
    meeting = f"file://{folder}/ddp-{num_processes}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_processes)
    cfg = training_config(stream, *TRAINING)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    torch.manual_seed(1)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    wrapped = DistributedDataParallel(model)
    wrapped.__class__ = type("Proxy", (DistributedDataParallel,), {"__getattr__": _of_module})  # like fairseq's proxy
    shard = {"num_shards": num_processes, "shard_id": rank}
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=3, **shard).next_epoch_itr(shuffle=False)
    mine = [next(batches) for _ in range(4 // num_processes)]
    size = 0
    for number, batch in enumerate(mine, 1):
        wrapped.require_backward_grad_sync = number == len(mine)
        loss, tokens, _ = criterion(wrapped, batch)
        loss.backward()
        size += tokens
    total = torch.tensor(float(size))
    dist.all_reduce(total)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).mul(num_processes / total).tolist()


def _of_module(self, name):
    try:
        return torch.nn.Module.__getattr__(self, name)
    except AttributeError:
        return getattr(torch.nn.Module.__getattr__(self, "module"), name)


@pytest.mark.slow
def test_the_gradient_of_torch_data_parallel_does_not_depend_on_the_number_of_processes(trained, tmp_path):
    ranks = (together(number, gradient_rank, number, tmp_path, trained.stream) for number in PROCESSES)
    gradients = [torch.tensor(each[0][0]) for each in ranks]
    assert gradients[0].norm() > 0.1
    for several in gradients[1:]:
        assert torch.allclose(gradients[0], several, rtol=1e-4, atol=1e-6)
