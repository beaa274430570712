"""A training of several epochs that is killed and resumed is bit-identical."""

import os
import signal

import pytest
import torch
from fairseq import checkpoint_utils

from tests.text.stock_commands import train_model

EPOCHS = ["--max-epoch", "3", "--max-update", "1000", "--megabatch", "0", "--save-interval-updates", "5"]


def train_forked(stream, folder, *arguments, kill_at=0):
    """Train in a forked process, kill it after ``kill_at`` saves (0: never), and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            save, left = checkpoint_utils.save_checkpoint, [kill_at]

            def save_and_count(*arguments, **options):
                saved = save(*arguments, **options)
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return saved

            checkpoint_utils.save_checkpoint = save_and_count
            train_model(stream, folder, *EPOCHS, *arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert train_forked(trained.stream, folder) == 0
    return load(folder)


def test_a_training_killed_in_its_third_epoch_resumes_bit_for_bit(whole, trained, tmp_path):
    per_epoch = whole["optimizer_history"][-1]["num_updates"] / 3
    saves_before = int(per_epoch * 2) // 5 + 2  # fairseq also saves at the end of each epoch
    assert train_forked(trained.stream, tmp_path, kill_at=saves_before + 2) == -signal.SIGKILL
    assert load(tmp_path)["extra_state"]["train_iterator"]["epoch"] == 3
    assert train_forked(trained.stream, tmp_path) == 0
    resumed = load(tmp_path)
    assert all(torch.equal(tensor, resumed["model"][name]) for name, tensor in whole["model"].items())
    assert resumed["optimizer_history"][-1]["num_updates"] == whole["optimizer_history"][-1]["num_updates"]
    assert resumed["extra_state"]["AlmaLMTask"] == whole["extra_state"]["AlmaLMTask"]
