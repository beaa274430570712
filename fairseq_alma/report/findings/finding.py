"""What a finding is: a claim of the paper, the comparisons that put it to the test here, and a verdict from them."""

import enum
from dataclasses import dataclass, field, replace
from typing import Optional, Sequence

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
        digits: decimals to show; None: two digits that count.
        scale: what it is shown in units of.
        ties_count: whether the claim is borne out too by figures that are too close to tell apart.
        decides: whether it says anything of the claim; not if the first one is behind, but for a far smaller budget.
    """

    lower: str
    higher: str
    low: Spread
    high: Spread
    what: str
    digits: Optional[int] = 2
    scale: float = 1.0
    ties_count: bool = False
    decides: bool = True

    @property
    def outcome(self) -> int:
        """1 where the claim is borne out, -1 where it is contradicted, 0 where nobody can tell."""
        if not self.decides:
            return 0
        if is_close(self.low, self.high):
            return 1 if self.ties_count else 0
        return 1 if self.low.mean < self.high.mean else -1

    @property
    def has_seeds(self) -> bool:
        """Whether both figures are of several seeds, or constants."""
        return 1 not in (self.low.num_seeds, self.high.num_seeds)

    def show(self) -> str:
        """Spell both figures and which is lower: ``final PPL: Ens_w1 (width 64) 24.35 < SM_w1 (width 64) 24.40``."""
        low, high = (spread.show(self.digits, self.scale) for spread in (self.low, self.high))
        sign = "≈" if is_close(self.low, self.high) else "<" if self.low.mean < self.high.mean else ">"
        gap = difference(self.low, self.high)
        by = ""
        if gap is not None:
            apart = replace(gap, mean=abs(gap.mean))
            by = f" (by {apart.show(self.digits, self.scale)} over {gap.num_seeds} shared seeds)"
        text = f"{self.what}: {_bracketed(self.lower)} {low} {sign} {_bracketed(self.higher)} {high}{by}"
        return text if self.decides else f"{text}; decides nothing, the first one costs less than half as much"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper against these runs.

    Where most comparisons decide nothing, there are not enough runs.

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
        outcomes = self._outcomes()
        if not outcomes or 2 * len(outcomes) < len(self.comparisons):
            return Verdict.NOT_ENOUGH
        held, contradicted = outcomes.count(1), outcomes.count(-1)
        if held and contradicted:
            return Verdict.IN_PART
        if 2 * max(held, contradicted) < len(outcomes):
            return Verdict.TOO_CLOSE
        return Verdict.HELD if held else Verdict.NOT_HELD

    @property
    def decided_by(self) -> str:
        """The counts behind the verdict, and how far they can be trusted, in one sentence."""
        outcomes = self._outcomes()
        held, contradicted, close = outcomes.count(1), outcomes.count(-1), outcomes.count(0)
        idle = len(self.comparisons) - len(outcomes)
        parts = [f"{held} of {len(self.comparisons)} comparisons bear{_s(held)} it out"]
        if contradicted:
            parts.append(f"{contradicted} contradict{_s(contradicted)} it")
        if close:
            parts.append(f"{close} {'is' if close == 1 else 'are'} too close to tell")
        if idle:
            parts.append(f"{idle} decide{_s(idle)} nothing")
        if len(self.comparisons) == len(outcomes) == 1:
            parts = ["the one comparison " + {1: "bears it out", -1: "contradicts it", 0: "is too close"}[outcomes[0]]]
        parts += self._trust()
        text = ", ".join(parts)
        told = [f"{text[0].upper()}{text[1:]}."] if self.comparisons else []
        told += [f"Needs {self.needed}."] if self.verdict is Verdict.NOT_ENOUGH else []
        return " ".join([*told, *([self.remark] if self.remark and self.comparisons else [])])

    def _outcomes(self) -> list[int]:
        """Return what the comparisons that decide anything come to."""
        return [comparison.outcome for comparison in self.comparisons if comparison.decides]

    def _trust(self) -> list[str]:
        """Say how many comparisons rest on a single seed."""
        deciding = [comparison for comparison in self.comparisons if comparison.decides]
        single = sum(not comparison.has_seeds for comparison in deciding)
        if single and single == len(deciding):
            return ["each rests on one seed" if single > 1 else "it rests on one seed"]
        return [f"{single} rest{_s(single)} on one seed"] if single else []


def _bracketed(name: str) -> str:
    """Spell ``SM_w1, 4 experts, width 64`` as ``SM_w1 (4 experts, width 64)``, to stand before a number."""
    label, _, rest = name.partition(", ")
    return f"{label} ({rest})" if rest else label


def _s(count: int) -> str:
    """Return the ending of a verb in the third person."""
    return "s" if count == 1 else ""
