"""``--new-first``: train on new mega-batches before the replay of all mega-batches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from fairseq_alma.options import TRAINING, opt, real
from fairseq_alma.training.feature import Feature, PlannedRun

if TYPE_CHECKING:
    import numpy


@dataclass
class NewFirst(Feature):
    """Feature that puts new training sequences before the sequences of all mega-batches."""

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
        if not run.replay:
            raise ValueError(f"--new-first {self.new_first:g} requires --replay; add --replay")

    def draw_first(self, num_all: int, num_new: int, seed: int) -> "numpy.ndarray":
        """Return the indices of the sequences with which training starts: a random sample of the new sequences.

        If all sequences are new, the sample is empty.

        Args:
            num_all: number of sequences; the new sequences are the last ones.
            num_new: number of new sequences.
            seed: random seed.
        """
        import numpy

        share = self.new_first if self.new_first is not None and num_new < num_all else 0
        order = numpy.random.default_rng((seed, num_all)).permutation(numpy.arange(num_all - num_new, num_all))
        return order[: round(share * num_new)]
