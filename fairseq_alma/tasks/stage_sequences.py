"""The sequences that a stage trains on: those of its mega-batches, and a share of earlier ones.

The number of updates does not grow by the latter, as ``--max-update`` bounds it.
"""

from typing import Sequence

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


class ReplayedSequences(BaseWrapperDataset):
    """Some sequences of a data set, in the order given; one may come several times.

    Args:
        dataset: earlier mega-batches.
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


def add_replay(
    new: Sequence[FairseqDataset], earlier: Sequence[FairseqDataset], share: float, seed: tuple[int, ...]
) -> ShuffledConcatDataset:
    """Join a stage's mega-batches, and as many sequences of earlier ones as make up a share of the whole.

    Args:
        new: mega-batches of the stage.
        earlier: those before it; empty: there is nothing to replay.
        share: from 0 to below 1.
        seed: what the draw depends on.
    """
    if not earlier or share == 0:
        return ShuffledConcatDataset(new)
    pool = ShuffledConcatDataset(earlier)
    drawn = draw_uniformly(len(pool), num_replayed(sum(map(len, new)), share), seed)
    return ShuffledConcatDataset([*new, ReplayedSequences(pool, drawn)])


def num_replayed(num_new: int, share: float) -> int:
    """Return how many sequences make up a share of the whole beside ``num_new`` others: 1 beside 3 for 0.25."""
    return round(share / (1 - share) * num_new)


def draw_uniformly(num_earlier: int, count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draw indices of earlier sequences at random; no sequence comes again before all others came as often.

    Args:
        num_earlier: sequences to draw from.
        count: how many are drawn.
        seed: what the draw depends on.
    """
    generator = np.random.default_rng(seed)
    passes, rest = divmod(count, num_earlier)
    return np.concatenate([np.tile(np.arange(num_earlier), passes), generator.permutation(num_earlier)[:rest]])
