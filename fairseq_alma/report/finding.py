"""What a finding is: a claim of the paper, the comparisons that put it to the test here, and a verdict from them.

Each comparison is of figures over the seeds of an experiment: their mean and deviation (`Spread`), and what these say.
"""

import enum
import math
import statistics
from dataclasses import dataclass, field
from typing import Hashable, Mapping, Optional, Sequence

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


class Verdict(enum.Enum):
    """Whether these runs bear a finding out."""

    HELD = "held"
    IN_PART = "held in part"
    NOT_HELD = "did not hold"
    TOO_CLOSE = "too close to tell"
    NOT_ENOUGH = "not enough runs"
    ONE_SEED = "one seed, no verdict"


@dataclass(frozen=True)
class Comparison:
    """Two figures of which the claim says that the first, ``low``, is the lower one.

    Attributes:
        lower: what has the first, named; ``higher`` the other.
        what: the figure's name.
        digits: decimals to show; None: two digits that count.
        scale: what it is shown in units of.
        ties_count: whether the claim is borne out too by figures that are too close to tell apart.
        is_matched: whether it says anything of the claim; not if the first one is behind, but for a far smaller budget.
        is_exact: whether the figures are the same for every seed, so that one of them will do.
    """

    lower: str
    higher: str
    low: Spread
    high: Spread
    what: str
    digits: Optional[int] = 2
    scale: float = 1.0
    ties_count: bool = False
    is_matched: bool = True
    is_exact: bool = False

    @property
    def points(self) -> int:
        """Where the figures point, be it by one seed: 1 to the claim, -1 against it, 0 where nobody can tell."""
        if is_close(self.low, self.high):
            return 1 if self.ties_count else 0
        return 1 if self.low.mean < self.high.mean else -1

    @property
    def has_seeds(self) -> bool:
        """Whether both figures are of several seeds, or the same for every seed."""
        return self.is_exact or 1 not in (self.low.num_seeds, self.high.num_seeds)

    @property
    def decides(self) -> bool:
        """Whether it counts for a verdict: one seed never does."""
        return self.is_matched and self.has_seeds

    @property
    def outcome(self) -> int:
        """As `points`, but 0 where it does not count."""
        return self.points if self.decides else 0

    def show(self) -> str:
        """Spell both figures and which is lower: ``final PPL: Ens_w1 (width 64) 24.35 < SM_w1 (width 64) 24.40``."""
        low, high = (spread.show(self.digits, self.scale) for spread in (self.low, self.high))
        sign = "≈" if is_close(self.low, self.high) else "<" if self.low.mean < self.high.mean else ">"
        text = f"{self.what}: {_bracketed(self.lower)} {low} {sign} {_bracketed(self.higher)} {high}"
        gap = difference(self.low, self.high)
        if gap is not None:
            sizes = abs(gap.mean), half_interval(gap.deviation, gap.num_seeds)
            interval = " ± ".join(Spread(size).show(self.digits, self.scale) for size in sizes)
            text += f" (by {interval}, 95 % over {gap.num_seeds} shared seeds)"
        if not self.has_seeds:
            return f"{text}; one seed decides nothing"
        return text if self.is_matched else f"{text}; decides nothing, the first one costs less than half as much"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, where it makes it, the runs needed to decide it, and what these runs say.

    Where most comparisons at hand decide nothing, there are not enough runs; those of one seed only point somewhere.
    ``lacks_part``: no comparison decides some part of the claim, which therefore cannot hold yet.
    """

    claim: str
    source: str
    needed: str
    comparisons: Sequence[Comparison] = ()
    remark: str = ""
    lacks_part: bool = False

    @property
    def _counts(self) -> tuple[int, int, int]:
        """How many of the comparisons that decide anything bear it out, contradict it, are too close to tell."""
        outcomes = [comparison.outcome for comparison in self.comparisons if comparison.decides]
        return outcomes.count(1), outcomes.count(-1), outcomes.count(0)

    @property
    def verdict(self) -> Verdict:
        """What the comparisons come to: a claim holds where none contradicts it and two thirds or more bear it out."""
        held, contradicted, close = self._counts
        deciding, with_seeds = held + contradicted + close, sum(each.has_seeds for each in self.comparisons)
        if not with_seeds and any(each.is_matched for each in self.comparisons):
            return Verdict.ONE_SEED
        if not deciding or 2 * deciding < with_seeds:
            return Verdict.NOT_ENOUGH
        if held and (contradicted or 3 * held < 2 * deciding):
            return Verdict.IN_PART
        if self.lacks_part and not contradicted:
            return Verdict.NOT_ENOUGH
        if not held and not contradicted:
            return Verdict.TOO_CLOSE
        return Verdict.HELD if held else Verdict.NOT_HELD

    @property
    def is_told(self) -> bool:
        """Whether these runs say something about it."""
        return self.verdict is not Verdict.NOT_ENOUGH

    @property
    def decided_by(self) -> str:
        """The counts behind the verdict, and how far they can be trusted, in one sentence; what runs are needed."""
        held, contradicted, close = self._counts
        deciding, total = held + contradicted + close, len(self.comparisons)
        single = [comparison.points > 0 for comparison in self.comparisons if not comparison.has_seeds]
        parts = [f"{held} of {total} comparisons bear{_s(held)} it out"] if deciding else []
        if total == deciding == 1:
            verb = "bears it out" if held else "contradicts it" if contradicted else "is too close"
            parts, contradicted, close = [f"the one comparison {verb}"], 0, 0
        parts += [f"{contradicted} contradict{_s(contradicted)} it"] if contradicted else []
        parts += [f"{close} {'is' if close == 1 else 'are'} too close to tell"] if close else []
        idle = total - deciding - len(single)
        parts += [f"{idle} decide{_s(idle)} nothing"] if idle else []
        if len(single) == 1:
            parts.append(f"1 rests on one seed, and {'points' if single[0] else 'does not point'} to it")
        elif single:
            points = sum(single)
            parts.append(f"{len(single)} rest on one seed, {points or 'none'} of which point{_s(points or 1)} to it")
        text = ", ".join(parts)
        told = [f"{text[0].upper()}{text[1:]}."] if total else []
        told += [f"Needs {self.needed}."] if not self.is_told else []
        return " ".join([*told, *([self.remark] if self.remark and total else [])])


def _bracketed(name: str) -> str:
    """Spell ``SM_w1, 4 experts, width 64`` as ``SM_w1 (4 experts, width 64)``, to stand before a number."""
    label, _, rest = name.partition(", ")
    return f"{label} ({rest})" if rest else label


def _s(count: int) -> str:
    """Return the ending of a verb in the third person."""
    return "s" if count == 1 else ""
