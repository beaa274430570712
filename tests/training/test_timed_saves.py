"""Checkpoint intervals in minutes: all processes save together, and the training does not change."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.trainer import Trainer

from fairseq_alma.training import features
from fairseq_alma.training.features import TimedSaves
from tests.forked import together
from tests.text.stock_commands import train_model
from tests.training.test_data_parallel import train_rank

UPDATES = ["--max-update", "18", "--megabatch", "0"]
EVERY = ["--save-interval-minutes", "2", "--save-interval-updates", "1000"]
NAMES = {f"checkpoint_1_{update}.pt" for update in (4, 8, 12, 16)} | {"checkpoint_last.pt"}


def let_updates_take(seconds, patch):
    """Replace the clock by one that only advances with updates."""
    clock, step = SimpleNamespace(now=0.0), Trainer.train_step
    clock.monotonic = lambda: clock.now

    def take(*arguments, **more):
        clock.now += seconds
        return step(*arguments, **more)

    patch.setattr(features, "time", clock)
    patch.setattr(Trainer, "train_step", take)


def load(path):
    return torch.load(path, weights_only=True)


def same(one, other):
    """Return whether two checkpoints have the same weights, moments and position in the data."""
    states = [each["last_optimizer_state"]["state"] for each in (one, other)]
    moments = [(states[0][index][name], states[1][index][name]) for index in states[0] for name in states[0][index]]
    weights = [(one["model"][name], other["model"][name]) for name in one["model"]]
    places = [each["extra_state"]["train_iterator"] for each in (one, other)]
    tensors = all(torch.equal(torch.as_tensor(here), torch.as_tensor(there)) for here, there in moments + weights)
    return tensors and places[0] == places[1] and states[0].keys() == states[1].keys()


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """Last checkpoint of a training without earlier checkpoints."""
    return load(train_model(trained.stream, tmp_path_factory.mktemp("whole"), *UPDATES))


def test_a_training_with_timed_saves_is_bit_identical(trained, whole, tmp_path, monkeypatch):
    let_updates_take(30, monkeypatch)
    last = load(train_model(trained.stream, tmp_path, *UPDATES, *EVERY))
    assert {path.name for path in tmp_path.iterdir()} == NAMES
    assert same(last, whole)
    assert last["cfg"]["checkpoint"]["save_interval_updates"] == 1000


def note_saves(rank, *arguments):
    """Train, and return the updates at which this process saves; only the clock of rank 0 advances."""
    let_updates_take(30 * (rank == 0), pytest.MonkeyPatch())
    found, look = [], TimedSaves.after_step

    def note(feature, model, update):
        look(feature, model, update)
        found.extend([update + 1] * (feature._saving.save_interval_updates == update + 1))

    TimedSaves.after_step = note
    train_rank(rank, *arguments)
    return found


def test_the_clock_of_rank_0_decides_for_all_processes(trained, tmp_path):
    saved = together(2, note_saves, 2, tmp_path, trained.stream, "--max-update", "12", *EVERY)[0]
    assert saved == [[4, 8, 12]] * 2
    assert NAMES - {"checkpoint_1_16.pt"} == {path.name for path in (tmp_path / "model-2").iterdir()}
