"""Training batches of text: consecutive slices of a random order of the sequences, with a new order for each epoch.

With ``--new-first F``, the first epoch reads a fraction F of the new sequences, and then all sequences.

The order depends only on seed, stage and epoch, and the position within an epoch counts sequences. Therefore
``--batch-size 4 --update-freq 2`` reads the same sequences as ``--batch-size 8``. A run that resumes with another batch
size, or with another number of workers or processes, still reads each sequence once per epoch. fairseq instead
counts and shuffles batches. By default, fairseq drops the last batch if its length is not a multiple of 8.

Example for 10 sequences in the order o, batches of 2 sequences, and 2 processes: process 0 reads o[0:2], o[4:6] and
o[8:10]; process 1 reads o[2:4], o[6:8] and a padding batch. Without the padding batch, fairseq would omit the earlier
batches of process 1 in the same update from the loss and the token count, but not from the gradient.
"""

from typing import Any, Optional, Sequence

import numpy as np
import torch
from fairseq.data import ConcatDataset, FairseqDataset
from fairseq.data.iterators import BufferedIterator, CountingIterator, EpochBatchIterating

from fairseq_alma.errors import AlmaError

POSITION_VERSION = 3
"""Version of the iterator state. The position counts sequences in version 3, and batches in fairseq's version 2."""

EMPTY = np.empty(0, dtype=int)


class StageDataset(ConcatDataset):
    """Training sequences of a stage.

    Args:
        datasets: sequences of each mega-batch.
        first: (M,) indices of the sequences that are read one extra time, at the start of the first epoch.
    """

    def __init__(self, datasets: Sequence[FairseqDataset], first: np.ndarray) -> None:
        super().__init__(datasets)
        self.first = first

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self))

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]


class SequenceBatches(EpochBatchIterating):
    """Iterator for fairseq's trainer over the training batches of one process.

    Args:
        dataset: dataset with the sequences.
        indices: (N,) indices of the sequences of an epoch.
        first: (M,) indices of the sequences that the first epoch reads before ``indices``.
        limits: ``max_tokens`` and ``max_sentences`` of a batch; None: no limit.
        seed: integers that seed the random order, together with the epoch.
        shard: (rank of this process, number of processes).
        pad: index of the padding symbol.
        epoch: number of the first epoch; epochs are numbered from 1.
        num_workers: number of processes that load data.
        buffer_size: number of batches to load ahead.
        save_dir: checkpoint directory, for error messages.
    """

    def __init__(
        self,
        dataset: FairseqDataset,
        indices: np.ndarray,
        limits: dict[str, Optional[int]],
        seed: Sequence[int],
        first: np.ndarray = EMPTY,
        shard: tuple[int, int] = (0, 1),
        pad: int = 1,
        epoch: int = 1,
        num_workers: int = 0,
        buffer_size: int = 0,
        save_dir: str = "",
    ) -> None:
        self.dataset, self.indices, self.limits, self.pad = dataset, indices, limits, pad
        self.seed, self.first = tuple(seed), first
        self.shard_id, self.num_shards = shard
        self.epoch, self.position = max(epoch, 1), 0  # position: number of sequences read before `_batches`
        self.num_workers, self.buffer_size, self.save_dir = num_workers, min(buffer_size, 20), save_dir
        self._batches: Sequence[np.ndarray] = ()
        self._cur_epoch_itr: Optional[CountingIterator] = None

    def _cut(self, order: np.ndarray) -> Sequence[np.ndarray]:
        size = self.limits["max_sentences"]
        if self.limits["max_tokens"] is None and size is not None:
            return [order[first : first + size] for first in range(0, len(order), size)]
        return self.dataset.batch_by_size(order, **self.limits, required_batch_size_multiple=1)

    def __len__(self) -> int:
        return -(-len(self._cut(np.concatenate(self._parts))) // self.num_shards)

    @property
    def _parts(self) -> list[np.ndarray]:
        """Return the groups of indices that the current epoch reads: ``first`` (only in epoch 1), then ``indices``."""
        return [self.first, self.indices] if self.epoch == 1 else [self.indices]

    @property
    def first_batch(self) -> Any:
        """Return a batch with one sequence, for use as fairseq's dummy batch."""
        return self.collate([self.dataset[self.indices[0]]])

    @property
    def next_epoch_idx(self) -> int:
        return self.epoch + (self._cur_epoch_itr is not None and self.end_of_epoch())

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> CountingIterator:
        """Return the batches of the next epoch or, after `load_state_dict`, the rest of the saved epoch."""
        if self.next_epoch_idx > self.epoch:
            self.epoch, self.position = self.next_epoch_idx, 0
        generator = np.random.default_rng((*self.seed, self.epoch))
        order = [generator.permutation(part) if shuffle else part for part in self._parts]
        self._batches = self._cut(np.concatenate(order)[self.position :])
        own = [[*map(int, batch)] for batch in self._batches[self.shard_id :: self.num_shards]]
        own += [[]] * (-(-len(self._batches) // self.num_shards) - len(own))
        loader: Any = torch.utils.data.DataLoader(
            self.dataset,
            collate_fn=self.collate,
            batch_sampler=own,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        if self.buffer_size and self.num_workers:
            loader = BufferedIterator(self.buffer_size, loader)
        self._cur_epoch_itr = CountingIterator(loader, start=0, total=len(own))
        return self._cur_epoch_itr

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return a batch of samples; without samples, return a batch of one sequence that contains only padding."""
        if samples:
            return self.dataset.collater(samples)
        batch = self.dataset.collater([self.dataset[self.indices[0]]])
        batch["net_input"]["src_tokens"].fill_(self.pad)
        batch["target"].fill_(self.pad)
        batch["ntokens"] = batch["nsentences"] = 0
        return batch

    def end_of_epoch(self) -> bool:
        return self._cur_epoch_itr is not None and not self._cur_epoch_itr.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        """Return the number of sequences (not batches) that all processes together have read in this epoch."""
        read = 0 if self._cur_epoch_itr is None else self._cur_epoch_itr.n * self.num_shards
        return self.position + sum(map(len, self._batches[:read]))

    def state_dict(self) -> dict[str, Any]:
        ended = self.end_of_epoch()
        position = 0 if ended else self.iterations_in_epoch
        return {"version": POSITION_VERSION, "epoch": self.epoch + ended, "iterations_in_epoch": position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at a saved position; raise AlmaError if the position is in batches or exceeds the epoch's length."""
        position = state_dict.get("iterations_in_epoch", 0)
        unit = "sequence" if state_dict.get("version") == POSITION_VERSION else "batch"
        self.epoch = state_dict["epoch"]
        num_sequences = sum(map(len, self._parts))
        if position and (unit == "batch" or position > num_sequences):
            raise AlmaError(
                f"{self.save_dir}: expected a position within the {num_sequences} sequences of the epoch, found "
                f"{unit} {position}; resume with the task and the data of the interrupted run, or give "
                "--reset-dataloader to begin the epoch again"
            )
        self.position = position
        self._cur_epoch_itr, self._batches = None, ()
