"""The order of a training is one of sequences; it does not depend on batches, processes or resumes."""

import numpy as np
import pytest
import torch
from fairseq.data.iterators import GroupedIterator

from fairseq_alma.errors import AlmaError
from fairseq_alma.text.task import SequenceBatches
from tests.text.stock_commands import train_model
from tests.text.test_task import task_of


@pytest.fixture(scope="module")
def task(trained):
    task = task_of(trained, "--megabatch", "1")
    task.load_dataset("train")
    return task


def iterator_of(task, batch, shard=(0, 1), max_tokens=None, **options):
    limits = {"max_tokens": max_tokens, "max_sentences": batch}
    return task.get_batch_iterator(task.dataset("train"), **limits, shard_id=shard[0], num_shards=shard[1], **options)


def ids(batch):
    return batch["id"].tolist() if batch["ntokens"] else []


def read(iterators, num_updates, update_freq):
    """Return the sequences of each of some updates, of all processes in the order of their batches."""
    grouped = [GroupedIterator(iter(each), update_freq) for each in iterators]
    updates = []
    for _ in range(num_updates):
        mine = [next(each) for each in grouped]
        updates.append([index for batches in zip(*mine, strict=True) for batch in batches for index in ids(batch)])
    return updates


def begin(task, batch, num_procs, state=None, max_tokens=None):
    iterators = [iterator_of(task, batch, (rank, num_procs), max_tokens) for rank in range(num_procs)]
    for each in iterators:
        if state is not None:
            each.load_state_dict(state)
    return iterators, [each.next_epoch_itr(shuffle=True) for each in iterators]


@pytest.mark.parametrize(("batch", "update_freq", "num_procs"), [(4, 2, 1), (2, 4, 1), (4, 1, 2), (1, 2, 4), (2, 2, 2)])
def test_batch_4_with_update_freq_2_reads_the_same_sequences_as_batch_8(task, batch, update_freq, num_procs):
    _, whole = begin(task, 8, 1)
    _, parts = begin(task, batch, num_procs)
    length = -(-len(task.dataset("train")) // 8)
    updates = read(whole, length, 1)
    assert updates == read(parts, length, update_freq)
    assert sorted(index for update in updates for index in update) == list(range(len(task.dataset("train"))))


def test_each_sequence_is_read_once_an_epoch_across_resumes_with_other_batches(task):
    state, seen = None, []
    for batch, update_freq, num_procs, max_tokens in (
        (8, 1, 1, None), (3, 2, 1, None), (2, 1, 2, None), (None, 1, 1, 100), (None, 1, 2, 64),
    ):  # fmt: skip
        iterators, epoch = begin(task, batch, num_procs, state, max_tokens)
        seen += [index for update in read(epoch, 2, update_freq) for index in update]
        states = [each.state_dict() for each in iterators]
        assert states[1:] == states[:-1]
        state = states[0]
    assert state["iterations_in_epoch"] == len(seen)
    iterators, epoch = begin(task, 7, 1, state)
    seen += [index for batch in epoch[0] for index in ids(batch)]
    assert sorted(seen) == list(range(len(task.dataset("train"))))
    assert iterators[0].state_dict() == {"version": 3, "epoch": 2, "iterations_in_epoch": 0}


def test_each_epoch_and_each_seed_has_its_own_order(task):
    def order(batch, **options):
        return [index for each in iterator_of(task, batch, **options).next_epoch_itr() for index in ids(each)]

    orders = [order(4, seed=seed, epoch=epoch) for seed, epoch in ((1, 1), (1, 2), (2, 1))]
    assert len({*map(tuple, orders)}) == 3
    one = iterator_of(task, 9, seed=1)
    assert [[index for each in one.next_epoch_itr() for index in ids(each)] for _ in range(2)] == orders[:2]


def test_a_process_without_a_batch_gets_padding_without_tokens(task):
    _, epochs = begin(task, -(-len(task.dataset("train")) // 3), 4)
    batches = [next(each) for each in epochs]
    assert [each["ntokens"] > 0 for each in batches] == [True, True, True, False]
    for each in batches:
        assert int(each["target"].ne(1).sum()) == each["ntokens"]
        assert int(each["net_input"]["src_tokens"].ne(1).sum()) == each["ntokens"]


@pytest.mark.parametrize(("version", "position", "found"), [(2, 3, "batch 3"), (3, 9999, "sequence 9999")])
def test_a_position_outside_of_the_epoch_is_refused(task, version, position, found):
    with pytest.raises(AlmaError, match=f"found {found}; resume with .*, or give --reset-dataloader"):
        iterator_of(task, 4).load_state_dict({"epoch": 1, "version": version, "iterations_in_epoch": position})


class Numbers(list):
    def collater(self, samples):
        return samples


def test_the_new_sequences_come_first_and_once():
    limits = {"max_tokens": None, "max_sentences": 2}
    iterator = SequenceBatches(Numbers(range(40)), limits, (1,), np.arange(30, 40))
    one, two = ([index for batch in iterator.next_epoch_itr() for index in batch] for _ in range(2))
    assert sorted(one[:10]) == [*range(30, 40)] and one[:10] != sorted(one[:10])
    assert sorted(one[10:]) == sorted(two) == [*range(40)]
    resumed = SequenceBatches(Numbers(range(40)), limits, (1,), np.arange(30, 40))
    resumed.load_state_dict({"epoch": 1, "version": 3, "iterations_in_epoch": 44})
    assert [index for batch in resumed.next_epoch_itr() for index in batch] == one[44:]


@pytest.mark.parametrize(("share", "wait", "count"), [("1", "1", 88), ("0.5", "1", 44), ("1", "2", 0)])
def test_only_new_mega_batches_come_first(trained, share, wait, count):
    task = task_of(trained, "--megabatch", "1", "--wait", wait, "--replay", "--new-first", share)
    task.load_dataset("train")
    first, num_old = iterator_of(task, 1).first, len(task.dataset("train").datasets[0])
    assert len({*first}) == count and {*first} <= {*range(num_old, num_old + 88)}  # with --wait 2, all are new


def test_a_training_resumes_with_other_batches_after_running_out_of_memory(trained, tmp_path):
    """The remedy on the page on operations (transformers #10113): half the batch, twice the update frequency."""
    how = ["--megabatch", "0", "--max-epoch", "2", "--max-update", "1000", "--dropout", "0", "--capacity-factor", "0"]
    how += ["--balance-loss-weight", "0", "--adam-eps", "1e-4"]
    whole = train_model(trained.stream, tmp_path / "whole", *how, "--batch-size", "8")
    halved = ["--batch-size", "4", "--update-freq", "2", "--checkpoint-activations"]
    train_model(trained.stream, tmp_path / "cut", *how, "--batch-size", "8", "--max-update", "5")
    cut = train_model(trained.stream, tmp_path / "cut", *how, *halved)
    one, other = (torch.load(path, weights_only=True) for path in (whole, cut))
    assert one["optimizer_history"][-1]["num_updates"] == other["optimizer_history"][-1]["num_updates"]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, atol=1e-4, rtol=1e-3)
    counts, changed = (each["extra_state"]["AlmaLMTask"] for each in (one, other))
    assert counts["train_tokens"] == changed["train_tokens"]
    assert [(each["from_update"], each["batch_size"]) for each in changed["batches"]] == [(0, 8), (5, 4)]
