"""What a stage trains on: the sequences of its mega-batches, some of earlier ones, and their batches.

fairseq composes batches once per process, from an order that it draws with the seed of the epoch in which the process
starts; only the order of the batches is drawn anew for each epoch. After a restart in a later epoch other sequences
would stand together, so batches are composed here as in a process that starts with the first epoch.

Process r of W takes the batches r, W + r, 2W + r, … of the epoch's one order, so ``W`` processes with ``--update-freq
U`` train as one with ``--update-freq W x U``. Two cases need care beside fairseq's own iterator:

- the last update of an epoch, for which some processes have no batch left. fairseq then drops what the process had for
  this update from loss, tokens and divisor, but not from the gradient. Here it gets a batch of padding;
- a resume with another W. fairseq counts the batches of each process; here the checkpoint says among how many
  processes (``extra_state["train_iterator"]["num_shards"]``).
"""

import contextlib
import functools
import math
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset, data_utils
from fairseq.data.iterators import EpochBatchIterator

from fairseq_alma.errors import AlmaError

NUM_SHARDS = "num_shards"

Batch = dict[str, Any]


class ShuffledConcatDataset(ConcatDataset):
    """The union of several mega-batches, its sequences in random order within one length.

    fairseq's own ``ConcatDataset`` orders by length alone, which leaves neighbouring sequences of a document in one
    batch; ``MonolingualDataset`` shuffles first, and so does this. fairseq seeds NumPy around the call.
    """

    def ordered_indices(self) -> np.ndarray:
        """Return all indices, sorted by length, in random order where lengths are equal."""
        return np.lexsort([np.random.permutation(len(self)), self.sizes])


class ChosenSequences(BaseWrapperDataset):
    """Some sequences of a data set, in the order given; one may come several times.

    Args:
        dataset: where they are from.
        indices: (N,) of the sequences.
    """

    def __init__(self, dataset: FairseqDataset, indices: np.ndarray) -> None:
        super().__init__(dataset)
        self.indices = indices

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, (N,)."""
        return self.dataset.sizes[self.indices]

    def num_tokens(self, index: int) -> int:
        """Return the tokens of one sequence."""
        return self.dataset.num_tokens(self.indices[index])

    def size(self, index: int) -> int:
        """Return the length of one sequence."""
        return self.dataset.size(self.indices[index])

    def ordered_indices(self) -> np.ndarray:
        """Return all indices; who joins data sets shuffles them."""
        return np.arange(len(self))


@contextlib.contextmanager
def shards_joined(prefixes: Sequence[Path]) -> Iterator[None]:
    """Have fairseq, which looks for one file of a split's name, load a split of several as if they were one.

    Args:
        prefixes: of the files, without ``.bin`` and ``.idx``, in order.
    """
    load_one = data_utils.load_indexed_dataset

    def load(path: str, *args: Any, **kwargs: Any) -> FairseqDataset:
        return ConcatDataset([load_one(str(prefix), *args, **kwargs) for prefix in prefixes])

    if len(prefixes) > 1:
        data_utils.load_indexed_dataset = load
    try:
        yield
    finally:
        data_utils.load_indexed_dataset = load_one


def join_stage(new: Sequence[FairseqDataset], before: Sequence[FairseqDataset], drawn: Optional[np.ndarray]) -> Any:
    """Join a stage's mega-batches, and some sequences of earlier ones.

    Args:
        new: the mega-batches.
        before: all earlier ones.
        drawn: numbers of sequences of these, counted through all; None: there are none.
    """
    if drawn is None:
        return ShuffledConcatDataset(new)
    return ShuffledConcatDataset([*new, ChosenSequences(ShuffledConcatDataset(before), drawn)])


def slice_of(dataset: FairseqDataset, num_tokens: int) -> ChosenSequences:
    """Choose sequences evenly from all over a mega-batch, of so many tokens together, or a little more.

    Args:
        dataset: the mega-batch.
        num_tokens: as many as its held-out slice has.
    """
    number = min(len(dataset), max(1, math.ceil(num_tokens / float(np.mean(dataset.sizes)))))
    return ChosenSequences(dataset, np.arange(number) * len(dataset) // number)


def stage_batches(
    build: Callable[..., EpochBatchIterator],
    task: Any,
    dataset: FairseqDataset,
    *args: Any,
    epoch: int = 1,
    **kwargs: Any,
) -> EpochBatchIterator:
    """Return fairseq's iterator over a split, as above.

    Args:
        build: fairseq's ``get_batch_iterator``.
        task: whose it is.
        dataset: the split.
        args: passed on.
        epoch: that the iterator begins with, from 1.
        kwargs: passed on; with ``update_epoch_batch_itr`` fairseq composes the batches anew for each epoch.
    """
    composes_anew = kwargs.get("update_epoch_batch_itr")
    before = task.dataset_to_epoch_iter.get(dataset)
    iterator = build(dataset, *args, epoch=epoch if composes_anew else 1, **kwargs)
    if iterator is not before and not composes_anew:  # else it knows its epoch
        iterator.epoch = max(epoch, 1)
    SharedBatches.take_over(iterator, task.source_dictionary.pad())
    return iterator


class SharedBatches(EpochBatchIterator):
    """fairseq's iterator over batches of text, as above."""

    @classmethod
    def take_over(cls, iterator: EpochBatchIterator, pad: int) -> None:
        """Turn fairseq's iterator, which its task builds, into one of this class.

        Args:
            iterator: not yet begun.
            pad: index of the padding symbol.
        """
        if isinstance(iterator, cls):
            return  # fairseq keeps an iterator for the next epoch
        iterator.__class__ = cls
        if iterator.num_shards > 1:
            iterator.collate_fn = functools.partial(
                collate_or_pad, iterator.collate_fn, iterator.dataset, iterator.frozen_batches[0][:1], pad
            )

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state, and among how many processes the batches are dealt."""
        return {**super().state_dict(), NUM_SHARDS: self.num_shards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the batches that all processes have had, however many those were.

        Raises:
            AlmaError: if the processes cannot share what is left of the epoch evenly.
        """
        before, batches = state_dict.get(NUM_SHARDS, self.num_shards), state_dict.get("iterations_in_epoch", 0)
        if before * batches % self.num_shards:
            raise AlmaError(
                f"the checkpoint is in the middle of an epoch, {before * batches} batches behind its beginning, which "
                f"is no multiple of {self.num_shards} processes; resume with {before}, or with any other number whose "
                "product with --update-freq is the same"
            )
        super().load_state_dict({**state_dict, "iterations_in_epoch": before * batches // self.num_shards})


def collate_or_pad(
    collate: Callable[[list[Any]], Batch], dataset: Any, example: list[int], pad: int, samples: list[Any]
) -> Batch:
    """Collate samples, or make a batch that has no token and no target of an example where there are none."""
    if samples:
        return collate(samples)
    batch = collate([dataset[index] for index in example])
    batch["net_input"]["src_tokens"].fill_(pad)
    batch["target"].fill_(pad)
    batch["ntokens"] = batch["nsentences"] = 0
    return batch
