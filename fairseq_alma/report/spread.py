"""Mean and deviation of a figure over the seeds of one experiment, and what they say when two are compared."""

import math
import statistics
from dataclasses import dataclass
from typing import Iterable, Optional

# Without several seeds nobody knows how far a figure would move; a gap below this share of it decides nothing.
SINGLE_SEED_SHARE = 0.01


@dataclass(frozen=True)
class Spread:
    """A figure over seeds.

    Attributes:
        mean: over the seeds.
        deviation: standard deviation with n - 1; NaN for one seed.
        num_seeds: n.
    """

    mean: float
    deviation: float
    num_seeds: int

    @staticmethod
    def of(values: Iterable[Optional[float]]) -> Optional["Spread"]:
        """Return mean and deviation of the values that are there, or None where none is."""
        found = [value for value in values if value is not None and not math.isnan(value)]
        if not found:
            return None
        deviation = statistics.stdev(found) if len(found) > 1 else math.nan
        return Spread(statistics.fmean(found), deviation, len(found))

    def show(self, digits: int, scale: float = 1.0) -> str:
        """Spell it: ``24.35 ± 0.12``, or ``24.35`` for one seed."""
        mean = f"{self.mean * scale:,.{digits}f}"
        return mean if self.num_seeds == 1 else f"{mean} ± {self.deviation * scale:,.{digits}f}"


def is_close(one: Spread, other: Spread) -> bool:
    """Tell whether two figures are too close to say which is smaller.

    With several seeds: where the ranges mean ± deviation touch; of two figures one of which has a single seed, the
    deviation of the other counts for both. With one seed each: where they differ by less than one percent.
    """
    deviations = [spread.deviation for spread in (one, other) if spread.num_seeds > 1]
    gap = abs(one.mean - other.mean)
    if not deviations:
        return gap < SINGLE_SEED_SHARE * max(abs(one.mean), abs(other.mean))
    return gap <= (sum(deviations) if len(deviations) == 2 else 2 * deviations[0])
