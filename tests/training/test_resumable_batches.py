"""A training of several epochs that is cut and resumed is bit-identical."""

import pytest
import torch

from tests.text.stock_commands import train_model

EPOCHS = ["--max-epoch", "3", "--megabatch", "0"]


@pytest.mark.slow
def test_a_training_cut_in_its_third_epoch_resumes_bit_for_bit(trained, tmp_path):
    def train(folder, end):
        last = train_model(trained.stream, tmp_path / folder, *EPOCHS, "--max-update", str(end))
        return torch.load(last, weights_only=True)

    whole = train("whole", 1000)
    num_updates = whole["optimizer_history"][-1]["num_updates"]
    cut = train("cut", num_updates - 2)
    assert cut["extra_state"]["train_iterator"]["epoch"] == 3
    assert cut["optimizer_history"][-1]["num_updates"] == num_updates - 2
    resumed = train("cut", 1000)
    assert all(torch.equal(tensor, resumed["model"][name]) for name, tensor in whole["model"].items())
    assert resumed["optimizer_history"][-1]["num_updates"] == num_updates
    assert resumed["extra_state"]["AlmaLMTask"] == whole["extra_state"]["AlmaLMTask"]
