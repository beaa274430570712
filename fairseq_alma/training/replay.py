"""Replay: a share of the sequences that a stage trains on come from the mega-batches before it.

The number of updates does not grow by them, as ``--max-update`` bounds it.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Optional, Sequence

import numpy as np

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, PlannedRun

LEAST_SEEN = "least-seen"
REPLAY_ORDERS = ("uniform", LEAST_SEEN)


@dataclass
class Replay(Feature):
    """Draws sequences of earlier mega-batches."""

    replay_share: Optional[float] = opt(
        None,
        "share of a stage's sequences that come from earlier mega-batches; the updates do not grow",
        range=real(0, 1, above=True, below=True),
        kinds=("text",),
        metavar="R",
        defaults={TRAINING: 0.0},
    )
    replay_order: Optional[str] = opt(
        None,
        "with --replay-share: draw them from all earlier ones, or first those that were in the fewest stages so far "
        f"(default: {REPLAY_ORDERS[0]})",
        choices=REPLAY_ORDERS,
        kinds=("text",),
        defaults={TRAINING: REPLAY_ORDERS[0]},
    )

    def check(self, run: PlannedRun) -> None:
        """Refuse a run that has nothing to replay, or all of it already."""
        if self.replay_share is None:
            raise ValueError("--replay-order: means nothing without --replay-share; give both")
        flag = f"--replay-share {self.replay_share:g}"
        if run.replay or len(run.plans) == 1:
            what = "there is one stage, and none before it"
            what = "--replay trains on all mega-batches already" if run.replay else what
            raise ValueError(f"{flag}: {what}; leave it out")
        run.require_updates(flag)

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> Optional[np.ndarray]:
        """Draw as many sequences as make up the share of the whole."""
        if self.replay_share is None or len(sizes) == 1:
            return None
        each = [sum(stage) for stage in sizes]
        ends = list(accumulate(map(len, sizes), initial=-1))[1:]  # the mega-batch that each stage ends with
        if self.replay_order == LEAST_SEEN:
            return draw_least_seen(each, self.replay_share, [(seed, end) for end in ends])
        return draw_uniformly(sum(each[:-1]), num_replayed(each[-1], self.replay_share), (seed, ends[-1]))


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
