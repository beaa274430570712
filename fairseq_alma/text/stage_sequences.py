"""The sequences that a stage trains on: those of its mega-batches, and some of earlier ones."""

import math
from typing import Any, Optional, Sequence

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset


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
