"""Mean and deviation of a figure over the seeds of one experiment, and what they say when two are compared."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Hashable, Mapping, Optional

# Without several seeds nobody knows how far a figure would move; a gap below this share of it is not even a hint.
SINGLE_SEED_SHARE = 0.01
# 97.5 % points of Student's t distribution with 1, 2, ... degrees of freedom: intervals of 95 % over few seeds.
_T_POINTS = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """A figure over seeds, or a constant, which has none.

    ``deviation`` is the standard deviation with n - 1; NaN for one seed, or where a value is infinite.
    """

    mean: float
    deviation: float = 0.0
    by_seed: Mapping[Hashable, float] = field(default_factory=dict, repr=False)

    @property
    def num_seeds(self) -> int:
        """0 for a constant."""
        return len(self.by_seed)

    @staticmethod
    def of(by_seed: Mapping[Hashable, Optional[float]]) -> Optional["Spread"]:
        """Return mean and deviation over the seeds that have a value, or None where none has."""
        found = {seed: value for seed, value in by_seed.items() if value is not None and not math.isnan(value)}
        if not found:
            return None
        values = list(found.values())
        is_known = len(values) > 1 and all(map(math.isfinite, values))  # a model that diverged has an infinite one
        return Spread(statistics.fmean(values), statistics.stdev(values) if is_known else math.nan, found)

    def show(self, digits: Optional[int], scale: float = 1.0) -> str:
        """Spell it: ``24.35 ± 0.12``, or ``24.35`` for one seed; without decimals to keep to as ``3e-08``."""
        form = ".2g" if digits is None else f",.{digits}f"
        mean = format(self.mean * scale, form)
        return mean if self.num_seeds < 2 else f"{mean} ± {format(self.deviation * scale, form)}"

    def show_interval(self) -> str:
        """Spell a difference with half the width of its 95 % interval, which one seed has not: ``+0.0123 ± 0.0010``."""
        half = half_width(self)
        return f"{self.mean:+.4f}" + ("" if half is None else f" ± {half:.4f}")


def difference(one: Spread, other: Spread) -> Optional[Spread]:
    """Return ``other - one`` over the seeds that both have, or None where they share fewer than two.

    Runs with the same seed share initial weights or the order of the data, so the difference spreads less than either.
    """
    shared = [seed for seed in one.by_seed if seed in other.by_seed]
    gap = Spread.of({seed: other.by_seed[seed] - one.by_seed[seed] for seed in shared})
    return gap if gap is not None and gap.num_seeds > 1 else None


def half_interval(deviation: float, num_seeds: int) -> float:
    """Return half the width of the 95 % interval of a mean over seeds (Student's t)."""
    freedom = num_seeds - 1
    point = _T_POINTS[freedom - 1] if freedom <= len(_T_POINTS) else 1.96 + 2.4 / freedom
    return point * deviation / math.sqrt(num_seeds)


def half_width(spread: Spread) -> Optional[float]:
    """Return half of the 95 % interval of a mean over seeds; None: there are fewer than two."""
    return half_interval(spread.deviation, spread.num_seeds) if spread.num_seeds > 1 else None


def is_close(one: Spread, other: Spread) -> bool:
    """Tell whether two figures are too close to say which is smaller: 0 is in the 95 % interval of their difference.

    The interval is that of the mean difference over shared seeds. Where no two seeds are shared, its width comes from
    the deviations of both, with as many degrees of freedom as the smaller of the two has, the deviation of the one
    counting for both if the other has a single seed. With one seed each there is none: then figures are close that
    differ by less than one percent. What diverged for every seed is worse than what did for none; where it did for
    some, nobody knows the interval.
    """
    diverged = [{math.isinf(value) for value in spread.by_seed.values()} for spread in (one, other)]
    if diverged in ([{True}, {False}], [{False}, {True}]):
        return False
    gap = difference(one, other)
    if gap is not None:
        return not abs(gap.mean) > half_interval(gap.deviation, gap.num_seeds)
    apart = abs(one.mean - other.mean)
    known = [spread.deviation for spread in (one, other) if spread.num_seeds > 1]
    if not known:
        return not apart >= SINGLE_SEED_SHARE * max(abs(one.mean), abs(other.mean))
    errors = [
        (spread.deviation if spread.num_seeds > 1 else known[0]) / math.sqrt(spread.num_seeds)
        for spread in (one, other)
        if spread.num_seeds
    ]
    seeds = min(spread.num_seeds for spread in (one, other) if spread.num_seeds > 1)
    return not apart > half_interval(math.hypot(*errors) * math.sqrt(seeds), seeds)
