"""What a finding is: a claim of the paper, the comparisons that put it to the test here, and a verdict from them."""

import enum
from dataclasses import dataclass, field, replace
from typing import Sequence

from fairseq_alma.report.spread import Spread, difference, is_close


class Verdict(enum.Enum):
    """Whether these runs bear a finding out."""

    HELD = "held"
    IN_PART = "held in part"
    NOT_HELD = "did not hold"
    TOO_CLOSE = "too close to tell"
    NOT_ENOUGH = "not enough runs"


@dataclass(frozen=True)
class Comparison:
    """Two figures of which the claim says that the first is the lower one.

    Attributes:
        lower: what is to be lower, named.
        higher: what it is compared with, named.
        low: its figure over seeds.
        high: the figure of the other.
        what: the figure's name.
        digits: decimals to show.
        scale: what it is shown in units of.
        ties_count: whether the claim is borne out too by figures that are too close to tell apart.
    """

    lower: str
    higher: str
    low: Spread
    high: Spread
    what: str
    digits: int = 2
    scale: float = 1.0
    ties_count: bool = False

    @property
    def outcome(self) -> int:
        """1 where the claim is borne out, -1 where it is contradicted, 0 where both are too close to tell."""
        if is_close(self.low, self.high):
            return 1 if self.ties_count else 0
        return 1 if self.low.mean < self.high.mean else -1

    @property
    def has_seeds(self) -> bool:
        """Whether both figures are of several seeds, or constants."""
        return 1 not in (self.low.num_seeds, self.high.num_seeds)

    def show(self) -> str:
        """Spell both figures and which is lower: ``Ens_w1 24.35 < SM_w1 24.40``."""
        low, high = (spread.show(self.digits, self.scale) for spread in (self.low, self.high))
        sign = "≈" if is_close(self.low, self.high) else "<" if self.low.mean < self.high.mean else ">"
        gap = difference(self.low, self.high)
        by = ""
        if gap is not None:
            apart = replace(gap, mean=abs(gap.mean))
            by = f" (by {apart.show(self.digits, self.scale)} over {gap.num_seeds} shared seeds)"
        return f"{self.what}: {self.lower} {low} {sign} {self.higher} {high}{by}"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper against these runs.

    Attributes:
        claim: one sentence.
        source: where the paper makes it.
        needed: the runs that would decide it.
        comparisons: what these runs say.
        remark: more to say, such as that only one size was there.
    """

    claim: str
    source: str
    needed: str
    comparisons: Sequence[Comparison] = field(default=())
    remark: str = ""

    @property
    def verdict(self) -> Verdict:
        """What the comparisons come to: a claim holds where none contradicts it and at least half bear it out."""
        if not self.comparisons:
            return Verdict.NOT_ENOUGH
        outcomes = [comparison.outcome for comparison in self.comparisons]
        held, contradicted = outcomes.count(1), outcomes.count(-1)
        if held and contradicted:
            return Verdict.IN_PART
        if 2 * max(held, contradicted) < len(outcomes):
            return Verdict.TOO_CLOSE
        return Verdict.HELD if held else Verdict.NOT_HELD

    @property
    def decided_by(self) -> str:
        """The counts behind the verdict, and how far they can be trusted, in one sentence."""
        if not self.comparisons:
            return f"Needs {self.needed}."
        outcomes = [comparison.outcome for comparison in self.comparisons]
        held, contradicted, close = outcomes.count(1), outcomes.count(-1), outcomes.count(0)
        parts = [f"{held} of {len(outcomes)} comparisons bear{_s(held)} it out"]
        if contradicted:
            parts.append(f"{contradicted} contradict{_s(contradicted)} it")
        if close:
            parts.append(f"{close} {'is' if close == 1 else 'are'} too close to tell")
        if len(outcomes) == 1:
            parts = ["the one comparison " + {1: "bears it out", -1: "contradicts it", 0: "is too close"}[outcomes[0]]]
        single = sum(not comparison.has_seeds for comparison in self.comparisons)
        if single == len(outcomes):
            parts.append("each rests on one seed" if len(outcomes) > 1 else "it rests on one seed")
        elif single:
            parts.append(f"{single} rest{_s(single)} on one seed")
        text = ", ".join(parts)
        return f"{text[0].upper()}{text[1:]}." + (f" {self.remark}" if self.remark else "")


def _s(count: int) -> str:
    """Return the ending of a verb in the third person."""
    return "s" if count == 1 else ""
