"""Training with the experts of each layer over several processes: what one process finds, and one checkpoint."""

import pytest
import torch
from fairseq import tasks
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train

from fairseq_alma.modules.moe.experts import Experts

from .conftest import evaluate, training_config
from .forked import group_options, together
from .test_data_parallel import train_together

# Epsilon: Adam turns a gradient of nothing but rounding into a whole step unless it is large. A norm that clips.
TRAINING = ("--num-experts", "8", "--expert-parallel", "--optimizer", "fused_adam", "--adam-eps", "1e-4")
TRAINING += ("--dropout", "0", "--clip-norm", "0.5", "--max-update", "24")


@pytest.fixture(scope="module")
def trainings(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expert-parallel")
    return {number: train_together(number, folder, trained.stream, *TRAINING) for number in (1, 2, 4)}


def flat(tensors):
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def moments(checkpoint):
    state = checkpoint["last_optimizer_state"]["state"]
    return flat(state[index][name] for index in sorted(state) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("num_processes", [2, 4])
def test_spread_experts_learn_what_those_of_one_process_do(trainings, num_processes):
    (alone, one), (spread, several) = trainings[1], trainings[num_processes]
    assert len(alone) == len(spread) == 24
    assert max(figures["gnorm"] for figures in alone) > 0.5  # so that clipping by the norm of all matters
    for here, there in zip(alone, spread, strict=True):
        assert there == pytest.approx(here, rel=2e-3, abs=2e-3)
    assert one["model"].keys() == several["model"].keys()
    assert torch.allclose(flat(one["model"].values()), flat(several["model"].values()), atol=1e-3)
    assert torch.allclose(moments(one), moments(several), atol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 1)])
def test_a_checkpoint_is_resumed_by_another_number_of_processes(trained, trainings, tmp_path, before, after):
    first = tmp_path / f"model-{before}"
    train_together(before, tmp_path, trained.stream, *TRAINING, "--max-update", "7")
    first.rename(tmp_path / f"model-{after}")
    figures, checkpoint = train_together(after, tmp_path, trained.stream, *TRAINING)
    whole = trainings[1][1]
    assert [line["num_updates"] for line in figures] == list(range(8, 25))
    assert torch.allclose(flat(whole["model"].values()), flat(checkpoint["model"].values()), atol=1e-3)


def test_a_checkpoint_of_several_processes_is_tested_by_one(trained, trainings, tmp_path):
    losses = []
    for number in (1, 4):
        torch.save(trainings[number][1], tmp_path / f"{number}.pt")
        losses.append(float(evaluate(trained.stream, tmp_path / f"{number}.pt")["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def shapes_rank(rank, num_processes, folder, stream):
    cfg = training_config(stream, "--megabatch", "0", *TRAINING, *group_options(num_processes, rank, folder))
    found = []

    def note_shapes(cfg):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        found.extend(experts.fc1_weight.shape for experts in model.modules() if isinstance(experts, Experts))

    distributed_utils.call_main(cfg, note_shapes)
    return found


def test_each_process_has_its_share_of_the_experts(trained, tmp_path):
    (one, two), _ = together(2, shapes_rank, 2, tmp_path, trained.stream)
    assert one == two and [shape[0] for shape in one] == [4]


def refused_rank(rank, num_processes, folder, stream, *arguments):
    words = ["--megabatch", "0", "--save-dir", str(folder), *arguments, *group_options(num_processes, rank, folder)]
    try:
        distributed_utils.call_main(training_config(stream, *words), train.main)
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-experts", "5"), "5 experts, which 2 processes cannot share evenly"),
        (("--moe-freq", "0"), "the model has no Switch layer; leave the option out"),
        (("--optimizer", "adam"), "goes with --optimizer fused_adam"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_the_first_process_alone(trained, tmp_path, arguments, message):
    (first, second), _ = together(2, refused_rank, 2, tmp_path, trained.stream, *TRAINING, *arguments)
    assert first[0] == "AlmaError" and message in first[1]
    assert second == ("SystemExit", "1")
    assert not list(tmp_path.glob("*.pt"))
