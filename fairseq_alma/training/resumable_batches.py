"""The same batches in every epoch, whichever epoch a process starts in: a resumed training is the one that was cut off.

fairseq composes batches once per process, from an order that it draws with the seed of the epoch in which the process
starts; only the order of the batches is drawn anew for each epoch. After a restart in a later epoch other sequences
would stand together.
"""

from typing import Any

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator

_FIRST_EPOCH = 1


class ResumableBatches:
    """Mixed into a task, in front of fairseq's class."""

    dataset_to_epoch_iter: dict[FairseqDataset, EpochBatchIterator]

    def get_batch_iterator(
        self, dataset: FairseqDataset, *args: Any, epoch: int = _FIRST_EPOCH, **kwargs: Any
    ) -> EpochBatchIterator:
        """Return fairseq's iterator, its batches composed as in a process that starts with the first epoch.

        Args:
            dataset: the split.
            args: passed on.
            epoch: that the iterator begins with, from 1.
            kwargs: passed on; with ``update_epoch_batch_itr`` fairseq composes the batches anew for each epoch.
        """
        hook = super().get_batch_iterator  # type: ignore[misc]
        if kwargs.get("update_epoch_batch_itr"):
            return hook(dataset, *args, epoch=epoch, **kwargs)
        before = self.dataset_to_epoch_iter.get(dataset)
        iterator = hook(dataset, *args, epoch=_FIRST_EPOCH, **kwargs)
        if iterator is not before:  # else it knows its epoch
            iterator.epoch = max(epoch, _FIRST_EPOCH)
        return iterator
