"""The experiments on one stream, and how findings pick pairs from them and compare these."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Iterator, Optional, Sequence

from fairseq_alma.metrics import anytime
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.findings.finding import Comparison
from fairseq_alma.report.measure import MEASURES, Measure
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.sizes import sizes_in_order
from fairseq_alma.report.spread import Spread

ABOUT_EQUAL = 1.25  # factor between two numbers of parameters that pass for the same budget
COMPARABLE = 2.0  # factor between two budgets at which who gets less out of the smaller one has shown something
NO_MORE = 1.02  # factor by which a budget may be exceeded: the gates of a mixture cost that little
Budget = Callable[[Experiment], float]


@dataclass(frozen=True)
class Evidence:
    """What findings are worked out from.

    Attributes:
        groups: experiments of one kind of data on one stream.
    """

    groups: Sequence[Experiment]

    @cached_property
    def measure(self) -> Measure:
        """How values of this kind of data are named and spelled."""
        return MEASURES[self.groups[0].first.kind]

    @cached_property
    def num_arrivals(self) -> int:
        """B."""
        return max(experiment.first.num_arrivals for experiment in self.groups)

    @cached_property
    def sizes(self) -> list[str]:
        """The sizes of backbone, the smallest first."""
        return sizes_in_order([run for experiment in self.complete for run in experiment.complete])

    @cached_property
    def complete(self) -> list[Experiment]:
        """Learners on the stream, not i.i.d. controls, with at least one complete run."""
        return [experiment for experiment in self.groups if experiment.complete and experiment.first.iid is None]

    def select(
        self, *learners: str, size: Optional[str] = None, replay: bool = False, times: Optional[float] = 1.0
    ) -> list[Experiment]:
        """Return the experiments of these learners (none given: of all).

        Args:
            learners: their names as a command takes them.
            size: of the backbone; None: any.
            replay: with replay, or without.
            times: multiple of the updates per stage; None: any.
        """
        return [
            each
            for each in self.complete
            if (not learners or each.first.learner in learners)
            and size in (None, each.first.size)
            and each.first.replay == replay
            and times in (None, each.times)
        ]

    def neighbouring_sizes(self) -> Iterator[tuple[str, str]]:
        """Yield each size and the next larger one."""
        return zip(self.sizes, self.sizes[1:], strict=False)

    def same_at(self, experiment: Experiment, size: str) -> Optional[Experiment]:
        """Return the same learner, with as many experts and the same options, over a backbone of another size."""
        wanted = experiment.label, experiment.first.experts
        found = (each for each in self.complete if each.first.size == size)
        return next((each for each in found if (each.label, each.first.experts) == wanted), None)

    def next_larger(self, experiment: Experiment) -> Optional[Experiment]:
        """Return the same learner over the next larger backbone that it was run with."""
        larger = self.sizes[self.sizes.index(experiment.first.size) + 1 :]
        return next((found for size in larger if (found := self.same_at(experiment, size)) is not None), None)

    def lower(self, one: Experiment, other: Experiment, ties_count: bool = False) -> list[Comparison]:
        """Compare CER or average perplexity, of which the claim says that the first one's is lower.

        Of learners that both wait long the final values are compared: what they sum up to hardly tells anything but how
        long the untrained model counted.
        """
        if _waits_long(one.first) and _waits_long(other.first):
            return self.lower_final(one, other)
        low, high = anytime_of(one), anytime_of(other)
        if low is None or high is None:
            return []
        what, digits = self.measure.anytime, self.measure.anytime_digits
        return [Comparison(one.name, other.name, low, high, what, digits, ties_count=ties_count)]

    def lower_final(self, one: Experiment, other: Experiment, early: Optional[int] = None) -> list[Comparison]:
        """Compare the values after the last update, of which the claim says that the first one's is lower.

        Args:
            one: claimed to be lower.
            other: claimed to be higher.
            early: the first one's value is that in force after this arrival instead; None: its last one too.
        """
        low = one.spread(lambda run: run.final if early is None else run.curve[early])
        high = other.spread(lambda run: run.final)
        if low is None or high is None:
            return []
        what = self.measure.final if early is None else f"{self.measure.name} after t{early} against the final one"
        return [Comparison(one.name, other.name, low, high, what, 2, self.measure.scale)]

    def best(self, candidates: Sequence[Experiment]) -> Optional[Experiment]:
        """Return the candidate with the lowest CER or average perplexity."""
        spreads = [(spread.mean, index) for index, each in enumerate(candidates) if (spread := anytime_of(each))]
        return candidates[min(spreads)[1]] if spreads else None

    def within_budget(
        self, candidates: Sequence[Experiment], other: Experiment, budget: Budget, ties_count: bool = False
    ) -> list[Comparison]:
        """Compare the best candidate that costs no more with another experiment; the claim says that it is lower.

        A candidate that is far cheaper and loses says nothing about the budget; one that wins does.
        """
        limit = budget(other)
        best = self.best([each for each in candidates if budget(each) <= NO_MORE * limit])
        if best is None:
            return []
        comparisons = self.lower(best, other, ties_count)
        is_far_cheaper = budget(best) < limit / COMPARABLE
        return [replace(each, decides=not is_far_cheaper or each.outcome > 0) for each in comparisons]


def _waits_long(run: RunFigures) -> bool:
    """Tell whether the untrained model decides a run's sum over all arrivals; with text it does after one of them."""
    return run.planned[0] > 0 if run.is_text else 2 * run.planned[0] >= run.num_arrivals


def anytime_of(experiment: Experiment) -> Optional[Spread]:
    """Return CER or average perplexity over seeds."""
    return experiment.spread(lambda run: run.anytime)


def memory(experiment: Experiment) -> float:
    """Return Mem, mean over seeds."""
    return _mean(experiment.spread(lambda run: run.memory))


def computation(experiment: Experiment) -> float:
    """Return Comp, mean over seeds."""
    return _mean(experiment.spread(lambda run: run.computation))


def final_params(experiment: Experiment) -> float:
    """Return the number of parameters after the last update."""
    return _mean(experiment.spread(lambda run: anytime.final(run.num_params)))


def _mean(spread: Optional[Spread]) -> float:
    return math.nan if spread is None else spread.mean
