"""Group runs that differ only in seeds into experiments, compute means over seeds, and give each experiment a name."""

import json
import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Mapping, Optional, Sequence

from pandas import DataFrame, concat

from fairseq_alma.report.read_run import RecordedRun

LEARNER_COLOURS = {
    "sm": "#0072B2", "moe": "#56B4E9", "ens": "#D55E00", "bagging": "#882255", "umix": "#009E73", "gens": "#E69F00",
    "gmoe": "#CC79A7", "firefly": "#333333",
}  # fmt: skip
"""Colour of each learner (most from the palette of Okabe and Ito, 2008), in the order of learners in tables."""
IMPLIED = ("--num-experts", "--grow-schedule", "--num-members", "--wait", "--replay", "--iid", "--drop-rest")
"""Options that an experiment name omits, because the label or the number of experts shows the value."""
# 97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T_POINTS = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Spread:
    """A metric over seeds: mean and sample standard deviation (NaN for one seed)."""

    mean: float
    deviation: float
    by_seed: Mapping[Any, float] = field(repr=False)

    @staticmethod
    def of(by_seed: Mapping[Any, float]) -> Optional["Spread"]:
        """Return the `Spread` over the seeds with a value other than NaN, or None without such seeds."""
        found = {seed: value for seed, value in by_seed.items() if not math.isnan(value)}
        values = list(found.values())
        deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        return Spread(statistics.fmean(values), deviation, found) if found else None

    def half_interval(self) -> float:
        """Return half the width of the 95 % confidence interval of the mean (Student's t); NaN for one seed."""
        freedom = len(self.by_seed) - 1
        if not freedom:
            return math.nan
        point = T_POINTS[freedom - 1] if freedom <= len(T_POINTS) else 1.96 + 2.4 / freedom
        return point * self.deviation / math.sqrt(freedom + 1)

    def minus(self, other: "Spread") -> Optional["Spread"]:
        """Return the spread of ``self`` minus ``other`` over the common seeds, or None without common seeds."""
        return Spread.of(
            {seed: value - other.by_seed[seed] for seed, value in self.by_seed.items() if seed in other.by_seed}
        )

    def show(self, digits: int) -> str:
        """Return mean and standard deviation as ``24.35 ± 0.12``, or only the mean for one seed."""
        return f"{self.mean:,.{digits}f}" + ("" if math.isnan(self.deviation) else f" ± {self.deviation:,.{digits}f}")


@dataclass(frozen=True, eq=False)
class Experiment:
    """One learner with one set of options, over any number of seeds.

    Attributes:
        runs: runs with distinct seeds, in descending order of the number of complete stages.
        times: ``--max-update``, divided by the smallest ``--max-update`` of runs with the same backbone size.
        name: name of the experiment in the report.
    """

    runs: Sequence[RecordedRun]
    times: float = 1.0
    name: str = ""

    @property
    def first(self) -> RecordedRun:
        return self.runs[0]

    @property
    def label(self) -> str:
        """Return learner, waiting time and ``times`` as in Table 2 of the paper, for example ``SM_w3 (3x steps)``."""
        times = round(self.times) if abs(self.times - round(self.times)) < 0.1 else self.times
        return self.first.label + ("" if times == 1 else f" ({times:.3g}x steps)")

    @property
    def is_complete(self) -> bool:
        """Return whether the experiment has a complete run and is not an i.i.d. control."""
        return not self.first.options.get("iid") and any(run.is_complete for run in self.runs)

    def spread(self, figure: Callable[[RecordedRun], float]) -> Optional[Spread]:
        """Return the spread of a metric over the seeds of complete runs, or None if no run is complete."""
        return Spread.of({run.seeds: figure(run) for run in self.runs if run.is_complete})

    def at(self, arrival: int, column: str = "curve", scale: float = 1.0) -> Optional[Spread]:
        """Return the spread of ``scale * column`` over seeds with an update at an arrival; None without such seeds."""
        runs = [run for run in self.runs if arrival in run.done.index]
        return Spread.of({run.seeds: scale * float(run.arrivals.at[arrival, column]) for run in runs})

    @cached_property
    def course(self) -> DataFrame:
        """Return mean metrics, compute and sizes of the runs with the most complete stages, one row per arrival.

        Column ``deviation`` contains the sample standard deviation of ``curve`` over these runs, or 0 for one run.
        """
        longest = [run for run in self.runs if len(run.done) == len(self.first.done)]
        rows = concat([run.arrivals for run in longest]).groupby(level=0)
        course = rows[["curve", "average", "tflops", "params", "experts"]].mean()
        course["deviation"] = rows.curve.std().fillna(0.0)
        return course.assign(done=self.first.arrivals.done)


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group runs into experiments, sorted by backbone size, learner and waiting time.

    If several runs have the same options and seeds, keep only the run with the most complete stages.
    """
    groups: dict[str, dict[Any, RecordedRun]] = {}
    for run in sorted(runs, key=lambda run: -len(run.done)):
        key = json.dumps([run.record["learner"], run.settings, run.stream_key, len(run.arrivals)], sort_keys=True)
        groups.setdefault(key, {}).setdefault(run.seeds, run)
    words = {run: str(run.record["train_options"].get("--max-update", "")) for run in runs}
    max_updates = {run: int(word) for run, word in words.items() if word.isdecimal() and int(word)}
    fewest, smallest = {}, {}
    for run in runs:
        same = [other for other in runs if other.size == run.size]
        fewest[run.size] = min((max_updates[other] for other in same if other in max_updates), default=1)
        smallest[run.size] = min(float(other.done.num_params.min()) if len(other.done) else 0.0 for other in same)
    unnamed = []
    for group in groups.values():
        same_options = [*group.values()]
        first = same_options[0]
        times = max_updates[first] / fewest[first.size] if first in max_updates else 1.0
        unnamed.append(Experiment(same_options, times))

    def order(each: Experiment) -> tuple[Any, ...]:
        run, learners = each.first, list(LEARNER_COLOURS)
        rank = [*learners, run.record["learner"]].index(run.record["learner"])
        most = tuple(run.done[["num_members", "num_experts"]].max()) if len(run.done) else (0, 0)
        options = run.options["replay"], run.options.get("iid") or 0, run.options["wait"]
        return smallest[run.size], run.size, rank, *options, each.times, *most

    return _named(sorted(unnamed, key=order))


def iid_pairs(groups: Sequence[Experiment]) -> list[tuple[Experiment, Experiment, int]]:
    """Return (i.i.d. control, sequential experiment, number of mega-batches k) for each pair to compare.

    The experiments of a pair have the same options; the sequential experiment has ``--wait 1``.
    """

    def key(each: Experiment) -> tuple[Any, ...]:
        settings = sorted(each.first.settings.items())
        return each.first.record["learner"], *(s for s in settings if s[0] not in ("--iid", "--wait", "--drop-rest"))

    eager = {key(e): e for e in groups if not e.first.options.get("iid") and e.first.options["wait"] == 1}
    controls = [each for each in groups if each.first.options.get("iid") and key(each) in eager]
    return [(each, eager[key(each)], each.first.options["iid"]) for each in controls]


def _named(groups: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments with distinct names: label and, if necessary, experts, size and differing options."""
    candidates = []
    for each in groups:
        experts, size = each.first.experts, each.first.size
        experts += "" if experts.endswith("models") else " experts"
        candidates.append([", ".join((each.label, *added)) for added in ((), (experts,), (size,), (experts, size))])
    named = []
    for each, names in zip(groups, candidates, strict=True):
        unique = [name for rank, name in enumerate(names) if [other[rank] for other in candidates].count(name) == 1]
        if not unique:
            own = each.first.settings
            same_name = [group for group, other in zip(groups, candidates, strict=True) if other[-1] == names[-1]]
            flags = dict.fromkeys(flag for other in (each, *same_name) for flag in other.first.settings)
            values = {flag: {other.first.settings.get(flag) for other in same_name} for flag in flags}
            differing = [flag for flag in flags if len(values[flag]) > 1 and flag not in IMPLIED]
            shown = [f"{flag} {own[flag]}" if flag in own else f"no {flag}" for flag in differing]
            unique = [", ".join([names[1], *(shown or [each.first.stream_key[:8]])])]
        named.append(Experiment(each.runs, each.times, unique[0]))
    return named
