"""What is drawn as one: the runs of an experiment, which differ by their seeds alone, and the values that are shown."""

import math
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Iterable, Sequence

from fairseq_alma.report.experiment import Experiment, experiments
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.sizes import sizes_in_order


@dataclass(frozen=True)
class RunGroup:
    """An experiment as figures show it: means over its seeds.

    Attributes:
        experiment: at least one of its runs has a first update.
    """

    experiment: Experiment

    @property
    def first(self) -> RunFigures:
        """The run that stands for the others in all that the seed does not change; the furthest one."""
        return self.experiment.first

    @cached_property
    def furthest(self) -> list[RunFigures]:
        """The runs that got furthest: a mean over runs that end at different arrivals would jump where one ends."""
        lengths = [len(run.curve) for run in self.experiment.runs]
        return [run for run, length in zip(self.experiment.runs, lengths, strict=True) if length == max(lengths)]

    @property
    def is_complete(self) -> bool:
        """Whether at least one of the runs is."""
        return bool(self.experiment.complete)

    @property
    def size(self) -> str:
        """Size of the backbone, the same for all learners that build upon it."""
        return self.first.size

    @cached_property
    def curve(self) -> list[float]:
        """Mean over the seeds of the value in force after each arrival: perplexity, or error in percent."""
        return [statistics.fmean(values) for values in self._curves]

    @cached_property
    def deviations(self) -> list[float]:
        """Standard deviation (n - 1) over the seeds at each arrival, 0 for one seed."""
        return [deviation_of(values) for values in self._curves]

    @cached_property
    def updates(self) -> list[int]:
        """Arrivals at which the model was updated, as far as the curve is known."""
        return sorted(arrival for arrival in self.furthest[0].value if arrival < len(self.curve))

    @cached_property
    def anytime(self) -> tuple[float, float]:
        """Mean and deviation over the seeds of average perplexity or CER; only where `is_complete`."""
        values = [run.anytime for run in self.experiment.complete if run.anytime is not None]
        return statistics.fmean(values), deviation_of(values)

    @property
    def bar(self) -> tuple[float, float]:
        """The ends of the bar that shows the deviation of `anytime`."""
        mean, deviation = self.anytime
        return mean - deviation, mean + deviation

    @property
    def _curves(self) -> list[tuple[float, ...]]:
        return list(zip(*(shown_curve(run) for run in self.furthest), strict=True))


def deviation_of(values: Sequence[float]) -> float:
    """Return the standard deviation (n - 1); 0 for one value, and where a run diverged to no number."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def shown_curve(run: RunFigures) -> list[float]:
    """Return the values in force after each arrival as people read them: perplexities, or errors in percent."""
    return [value * scale_of(run) for value in run.curve]


def scale_of(run: RunFigures) -> float:
    """Return what a run's value is multiplied with to be shown."""
    return MEASURES[run.kind].scale


def value_label(run: RunFigures) -> str:
    """Name what `shown_curve` shows, with its unit."""
    return "test perplexity" if run.is_text else "test error (%)"


def anytime_label(run: RunFigures) -> str:
    """Name what `RunGroup.anytime` is, with its unit."""
    return "average test perplexity" if run.is_text else "cumulative error rate (% points)"


def groups_of(runs: Sequence[RunFigures]) -> list[RunGroup]:
    """Gather the runs of each experiment, in the order of `experiments`; those without a first update are left out."""
    begun = [run for run in runs if min(run.value, default=run.num_arrivals) < len(run.curve)]
    return [RunGroup(experiment) for experiment in experiments(begun)]


def complete_groups(runs: Sequence[RunFigures]) -> list[RunGroup]:
    """Gather the runs of each experiment that learned from a whole stream; the i.i.d. controls do not."""
    return [group for group in groups_of(runs) if group.is_complete and group.first.iid is None]


def by_size(groups: Iterable[RunGroup]) -> dict[str, list[RunGroup]]:
    """Sort groups by the size of their backbone, the smallest first."""
    listed = list(groups)
    sizes = sizes_in_order([run for group in listed for run in group.experiment.runs])
    return {size: [group for group in listed if group.size == size] for size in sizes}


def names_of(groups: Sequence[RunGroup]) -> list[str]:
    """Name groups as briefly as tells them apart: by learner and wait, or with their experts, or by everything."""
    spelled = [_spellings(group.experiment) for group in groups]
    names = []
    for own in spelled:
        brief = (name for name, *others in zip(*[own, *spelled], strict=True) if others.count(name) == 1)
        names.append(next(brief, own[-1]))
    return names


def detail_of(group: RunGroup, name: str) -> str:
    """Return what a name of `names_of` says beyond learner and waiting time: ``4 experts``."""
    return name.removeprefix(group.experiment.label).removeprefix(", ")


def _spellings(experiment: Experiment) -> tuple[str, ...]:
    return (
        experiment.label,
        replace(experiment, size="", note="").name,
        f"{experiment.label}, {experiment.size}".removesuffix(", "),
        replace(experiment, size="").name,
        experiment.name,
    )
