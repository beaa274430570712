"""fairseq-train ends in one line where the state of a training in a checkpoint is not that of its model."""

import pytest
import torch

from fairseq_alma.errors import AlmaError
from tests.test_any_input import with_value
from tests.text.stock_commands import train_model

ARGUMENTS = ["--megabatch", "0", "--num-experts", "2", "--save-interval-updates", "3"]
ALTERED = {
    "moment of another shape": (("last_optimizer_state", "state", 0, "exp_avg"), torch.zeros(5)),
    "moment of whole numbers": (("last_optimizer_state", "state", 0, "exp_avg"), torch.zeros(5, dtype=torch.int32)),
    "no moments": (("last_optimizer_state", "state", 0), {"step": 3}),
    "fewer parameters": (("last_optimizer_state", "param_groups", 0, "params"), [0, 1]),
    "options of another optimizer": (("last_optimizer_state", "param_groups", 0), {"params": []}),
    "another optimizer": (("optimizer_history", 0, "optimizer_name"), "FairseqSGD"),
    "meter": (("extra_state", "metrics", "train"), [(0, "loss", "AverageMeter", {"val": "x"})]),
    "count": (("extra_state", "AlmaLMTask"), {"train_tokens": "many"}),
    "batch": (("extra_state", "train_iterator", "iterations_in_epoch"), 10**9),
}


@pytest.fixture(scope="module")
def begun(trained, tmp_path_factory):
    """A stream, and a checkpoint of a training that is not over."""
    folder = tmp_path_factory.mktemp("resumed")
    return trained.stream, train_model(trained.stream, folder, *ARGUMENTS, "--max-update", "3")


@pytest.mark.parametrize("kind", ALTERED)
def test_a_state_that_does_not_fit_ends_fairseq_train_in_one_line(kind, begun, tmp_path):
    stream, good = begun
    content = torch.load(good, weights_only=False)
    torch.save(with_value(content, *ALTERED[kind]), tmp_path / "checkpoint_last.pt")
    with pytest.raises(AlmaError) as error:
        train_model(stream, tmp_path, *ARGUMENTS, "--max-update", "5")
    assert str(tmp_path) in str(error.value)
    assert "; give " in str(error.value) and "\n" not in str(error.value)


def test_a_training_with_a_new_optimizer_begins_with_the_weights_alone(begun, tmp_path):
    stream, good = begun
    arguments = ["--restore-file", str(good), "--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader"]
    last = train_model(stream, tmp_path, *ARGUMENTS, *arguments, "--reset-meters", "--optimizer", "sgd")
    assert torch.load(last, weights_only=False)["optimizer_history"][-1]["optimizer_name"] == "SGD"
