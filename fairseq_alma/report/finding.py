"""What a finding is: a claim of the paper, the comparisons that put it to the test here, and a verdict from them."""

import enum
from dataclasses import dataclass
from typing import Optional, Sequence

from fairseq_alma.report.spread import Spread, difference, half_interval, is_close


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
