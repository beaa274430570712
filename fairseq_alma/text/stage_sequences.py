"""The sequences that a stage trains on: those of its mega-batches, and a share of earlier ones.

The number of updates does not grow by the latter, as ``--max-update`` bounds it.
"""

import math
from itertools import accumulate
from typing import Sequence

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset

from fairseq_alma.training.anytime_options import LEAST_SEEN


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


def add_replay(
    stages: Sequence[Sequence[FairseqDataset]], share: float, order: str, seed: int
) -> ShuffledConcatDataset:
    """Join a stage's mega-batches, and as many sequences of earlier ones as make up a share of the whole.

    Args:
        stages: the mega-batches of each stage so far, the one at hand last.
        share: from 0 to below 1; 0: nothing is replayed.
        order: see `REPLAY_ORDERS`.
        seed: what the draws depend on.
    """
    *before, new = stages
    if not before or share == 0:
        return ShuffledConcatDataset(new)
    pool = ShuffledConcatDataset([megabatch for stage in before for megabatch in stage])
    sizes = [sum(map(len, stage)) for stage in stages]
    ends = list(accumulate(map(len, stages), initial=-1))[1:]  # the mega-batch that each stage ends with
    if order == LEAST_SEEN:
        drawn = draw_least_seen(sizes, share, [(seed, end) for end in ends])
    else:
        drawn = draw_uniformly(len(pool), num_replayed(sizes[-1], share), (seed, ends[-1]))
    return ShuffledConcatDataset([*new, ChosenSequences(pool, drawn)])


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


def draw_least_seen(sizes: Sequence[int], share: float, seeds: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Draw indices of earlier sequences, first those that were in the fewest stages so far, at random among equals.

    What the stages before drew follows from their sizes and seeds, so that nothing needs to be kept: a stage that is
    trained again, or resumed after a kill, draws what it drew.

    Args:
        sizes: sequences of each stage's own mega-batches, the stage at hand last.
        share: of each stage's sequences that is replayed.
        seeds: what each stage's draw depends on.
    """
    counts, drawn = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for size, seed in zip(sizes, seeds, strict=True):
        if len(counts):
            drawn = _draw_lowest(counts, num_replayed(size, share), np.random.default_rng(seed))
        counts = np.concatenate([counts, np.ones(size, dtype=np.int64)])  # its own stage is the first to see it
    return drawn


def _draw_lowest(counts: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """Draw indices, each of one with the lowest count, which goes up by one; ``counts`` is brought up to date."""
    parts = []
    while number:
        part = generator.permutation(np.flatnonzero(counts == counts.min()))[:number]
        counts[part] += 1
        number -= len(part)
        parts.append(part)
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def slice_of(dataset: FairseqDataset, num_tokens: int) -> ChosenSequences:
    """Choose sequences evenly from all over a mega-batch, of so many tokens together, or a little more.

    Args:
        dataset: the mega-batch.
        num_tokens: as many as its held-out slice has.
    """
    number = min(len(dataset), max(1, math.ceil(num_tokens / float(np.mean(dataset.sizes)))))
    return ChosenSequences(dataset, np.arange(number) * len(dataset) // number)
