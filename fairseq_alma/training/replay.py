"""Replay of earlier mega-batches: ``--replay-share`` mixes earlier and new text, ``--new-first`` orders them.

Replay does not change the number of updates, because ``--max-update`` sets this number.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, Sequence

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, PlannedRun

if TYPE_CHECKING:
    import numpy


@dataclass
class Replay(Feature):
    """Feature that samples training sequences from earlier mega-batches, or reads the new mega-batches first."""

    replay_share: Optional[float] = opt(
        None,
        "fraction of the training sequences of a stage to sample from earlier mega-batches",
        range=real(0, 1, above=True, below=True),
        kinds=("text",),
        metavar="R",
        defaults={TRAINING: 0.0},
    )
    new_first: Optional[float] = opt(
        None,
        "with --replay: train first on a fraction of the new text; --passes counts new text",
        range=real(0, 1, above=True),
        kinds=("text",),
        recorded=False,
        metavar="F",
        defaults={TRAINING: 0.0},
    )

    def check(self, run: PlannedRun) -> None:
        if self.new_first is not None and not run.replay:
            raise ValueError(f"--new-first {self.new_first:g} requires --replay; add --replay")
        if self.replay_share is None:
            return
        given = f"--replay-share {self.replay_share:g}"
        if run.replay or len(run.plans) == 1:
            reason = "--replay trains on all mega-batches" if run.replay else "the run has only one stage"
            raise ValueError(f"{given}: {reason}; omit --replay-share")
        run.require_updates(given)

    def draw_first(self, indices: "numpy.ndarray", num_new: int, seed: int) -> "numpy.ndarray":
        """Return the sequences with which training starts: a random sample of the last ``num_new`` sequences.

        If all sequences are new, the sample is empty.
        """
        import numpy

        share = self.new_first if self.new_first is not None and num_new < len(indices) else 0
        generator = numpy.random.default_rng((seed, len(indices)))
        return generator.permutation(indices[len(indices) - num_new :])[: round(share * num_new)]

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Return the indices of uniformly sampled earlier sequences; repetition counts differ by at most 1."""
        import numpy

        if self.replay_share is None or len(sizes) == 1:
            return None
        num_earlier, num_new = sum(map(sum, sizes[:-1])), sum(sizes[-1])
        passes, rest = divmod(round(self.replay_share / (1 - self.replay_share) * num_new), num_earlier)
        generator = numpy.random.default_rng((seed, sum(map(len, sizes)) - 1))
        drawn = [numpy.tile(numpy.arange(num_earlier), passes), generator.permutation(num_earlier)[:rest]]
        return numpy.concatenate(drawn)
