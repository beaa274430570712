"""Sequences of earlier mega-batches for a stage whose number of updates does not grow by them."""

import numpy as np
from fairseq.data import BaseWrapperDataset, FairseqDataset


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
