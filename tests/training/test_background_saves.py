"""Checkpoints written beside the training are those that it would have waited for, whenever it is killed."""

import os
import signal
import threading

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_alma.checkpoints import checkpoint_file
from fairseq_alma.training import loading
from tests.forked import PATIENCE, together
from tests.text.stock_commands import train_model
from tests.training.test_data_parallel import train_rank

SAVES = ["--max-update", "20", "--megabatch", "0", "--save-interval-updates", "4", "--keep-interval-updates", "2"]
IN_BACKGROUND = "--save-in-background"
SHARED = ["--optimizer", "fused_adam", "--num-experts", "4", "--fully-shard", IN_BACKGROUND, "--max-update", "12"]
SHARED += ["--save-interval-updates", "5"]


def load(path):
    return torch.load(path, weights_only=True)


def same(one, other):
    """Tell whether two checkpoints are of the same training: weights, moments, counts and position."""
    state, states = "last_optimizer_state", [each["last_optimizer_state"]["state"] for each in (one, other)]
    moments = [(states[0][index][name], states[1][index][name]) for index in states[0] for name in states[0][index]]
    weights = [(one["model"][name], other["model"][name]) for name in one["model"]]
    places = [each["extra_state"]["train_iterator"] for each in (one, other)]
    tensors = all(torch.equal(torch.as_tensor(here), torch.as_tensor(there)) for here, there in moments + weights)
    return tensors and places[0] == places[1] and one[state].keys() == other[state].keys()


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    return train_model(trained.stream, tmp_path_factory.mktemp("whole"), *SAVES)


def test_each_file_is_the_one_that_a_training_waits_for(whole, trained, tmp_path):
    last = train_model(trained.stream, tmp_path, *SAVES, IN_BACKGROUND)
    # the one before stays until the next is there
    assert {path.name for path in whole.parent.iterdir()} <= {path.name for path in last.parent.iterdir()}
    for path in whole.parent.iterdir():
        assert same(load(path), load(tmp_path / path.name))
        # tied embeddings are in the file once
        assert path.stat().st_size == pytest.approx((tmp_path / path.name).stat().st_size, rel=0.02)


def test_a_training_goes_on_while_its_checkpoint_is_written(trained, tmp_path, monkeypatch):
    went_on, write, step = threading.Event(), checkpoint_utils._torch_persistent_save, Trainer.train_step

    def wait_and_write(state, file):
        assert went_on.wait(PATIENCE), "the training waits for its checkpoint"
        return write(state, file)

    def step_and_tell(trainer, *arguments, **more):
        found = step(trainer, *arguments, **more)
        if trainer.get_num_updates() == 6:
            assert not (tmp_path / "checkpoint_last.pt").exists()
            went_on.set()
        return found

    monkeypatch.setattr(checkpoint_utils, "_torch_persistent_save", wait_and_write)
    monkeypatch.setattr(Trainer, "train_step", step_and_tell)
    last = train_model(trained.stream, tmp_path, *SAVES[2:], "--max-update", "7", IN_BACKGROUND)
    assert load(last)["optimizer_history"][-1]["num_updates"] == 7
    assert load(tmp_path / "checkpoint_1_4.pt")["optimizer_history"][-1]["num_updates"] == 4


def kill_within_save(number, function, *arguments):
    """End this process in the middle of a file."""
    write, left = checkpoint_utils._torch_persistent_save, [number]

    def write_half(state, file):
        left[0] -= 1
        if left[0] == 0:
            file.write(b"PK\x03\x04 half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(state, file)

    checkpoint_utils._torch_persistent_save = write_half
    function(*arguments)


@pytest.mark.parametrize("number", [1, 3])
def test_a_training_that_is_killed_within_a_file_resumes_to_the_same_bits(number, whole, trained, tmp_path):
    child = os.fork()
    if child == 0:
        kill_within_save(number, train_model, trained.stream, tmp_path, *SAVES, IN_BACKGROUND)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "checkpoint_last.pt").exists() == (number > 1)
    assert same(load(train_model(trained.stream, tmp_path, *SAVES, IN_BACKGROUND)), load(whole))


def test_a_file_that_cannot_be_written_ends_the_training(trained, tmp_path, monkeypatch):
    def fail(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_utils, "_torch_persistent_save", fail)
    with pytest.raises(OSError, match="No space left"):
        train_model(trained.stream, tmp_path, "--max-update", "3", "--megabatch", "0", IN_BACKGROUND)


def read_by_first(rank, *arguments):
    """Train, and return how many checkpoints this process has read whole."""
    read, found = checkpoint_file.read_checkpoint, []

    def read_and_note(path, *more, mmap=True, **others):
        found.extend([path] * (not mmap))
        return read(path, *more, mmap=mmap, **others)

    loading.read_checkpoint = read_and_note
    train_rank(rank, *arguments)
    return len(found)


@pytest.mark.slow
def test_two_processes_that_are_resumed_read_one_file_by_the_first_and_end_with_the_same_bits(trained, tmp_path):
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    together(2, train_rank, 2, tmp_path / "whole", trained.stream, *SHARED)
    cut = tmp_path / "resumed"
    together(2, train_rank, 2, cut, trained.stream, *SHARED, "--max-update", "7")
    last = cut / "model-2" / "checkpoint_last.pt"
    last.unlink()  # as if they had been killed after the fifth
    os.link(cut / "model-2" / "checkpoint_1_5.pt", last)
    (cut / "group-2").unlink(missing_ok=True)
    assert together(2, read_by_first, 2, cut, trained.stream, *SHARED)[0] == [1, 0]
    assert same(load(last), load(tmp_path / "whole" / "model-2" / "checkpoint_last.pt"))
