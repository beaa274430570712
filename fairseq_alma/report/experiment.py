"""Group runs that differ by their seeds alone into experiments: means over seeds, names that distinguish them."""

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
"""Colours of Okabe and Ito (2008), in the order in which tables list the learners."""
IMPLIED = ("--num-experts", "--grow-schedule", "--num-members", "--wait", "--replay", "--iid", "--drop-rest")
"""Options that label and experts already show."""
# 97.5 % points of Student's t distribution with 1, 2, ... degrees of freedom.
T_POINTS = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; ``deviation`` is the standard deviation with n - 1, NaN for one seed."""

    mean: float
    deviation: float
    by_seed: Mapping[Any, float] = field(repr=False)

    @staticmethod
    def of(by_seed: Mapping[Any, float]) -> Optional["Spread"]:
        """Return mean and deviation over the seeds that have a value, or None if none has one."""
        found = {seed: value for seed, value in by_seed.items() if not math.isnan(value)}
        values = list(found.values())
        if not values:
            return None
        is_known = len(values) > 1 and all(map(math.isfinite, values))
        return Spread(statistics.fmean(values), statistics.stdev(values) if is_known else math.nan, found)

    def half_interval(self) -> float:
        """Return half the width of the 95 % interval of the mean (Student's t); NaN for one seed."""
        freedom = len(self.by_seed) - 1
        if not freedom:
            return math.nan
        point = T_POINTS[freedom - 1] if freedom <= len(T_POINTS) else 1.96 + 2.4 / freedom
        return point * self.deviation / math.sqrt(freedom + 1)

    def minus(self, other: "Spread") -> Optional["Spread"]:
        """Return the difference over the seeds that both have, or None if they share none."""
        return Spread.of(
            {seed: value - other.by_seed[seed] for seed, value in self.by_seed.items() if seed in other.by_seed}
        )

    def show(self, digits: int) -> str:
        """Format as ``24.35 ± 0.12``, or ``24.35`` for one seed."""
        return f"{self.mean:,.{digits}f}" + ("" if math.isnan(self.deviation) else f" ± {self.deviation:,.{digits}f}")


@dataclass(frozen=True, eq=False)
class Experiment:
    """One learner with all its settings, over any number of seeds.

    Attributes:
        runs: with distinct seeds, the one with the most updates first.
        times: updates per stage, divided by the fewest among experiments on this backbone.
        name: distinguishes it from the others of the report.
    """

    runs: Sequence[RecordedRun]
    times: float = 1.0
    name: str = ""

    @property
    def first(self) -> RecordedRun:
        """The run with the most updates; what all seeds share can be read off it."""
        return self.runs[0]

    @property
    def label(self) -> str:
        """Learner and waiting time as in Table 2: ``SM_w3 (3x steps)``."""
        times = round(self.times) if abs(self.times - round(self.times)) < 0.1 else self.times
        return self.first.label + ("" if times == 1 else f" ({times:.3g}x steps)")

    @property
    def colour(self) -> str:
        """The colour of its learner; grey for one that the paper does not have."""
        return LEARNER_COLOURS.get(self.first.record["learner"], "#666666")

    @property
    def is_complete(self) -> bool:
        """Whether a run learned from the whole stream, which an i.i.d. control does not."""
        return not self.first.options.get("iid") and any(run.is_complete for run in self.runs)

    def spread(self, figure: Callable[[RecordedRun], float]) -> Optional[Spread]:
        """Return a figure over the seeds whose runs are complete."""
        return Spread.of({run.seeds: figure(run) for run in self.runs if run.is_complete})

    def at(self, arrival: int, column: str = "curve") -> Optional[Spread]:
        """Return a figure of the update at an arrival, over seeds; None where there is no update."""
        has_it = [run for run in self.runs if arrival in run.done.index]
        return Spread.of({run.seeds: float(run.arrivals.at[arrival, column]) for run in has_it})

    @cached_property
    def course(self) -> DataFrame:
        """Means over the runs with the most updates, a row for each arrival; ``deviation`` is that of the curve."""
        longest = [run for run in self.runs if len(run.done) == len(self.first.done)]
        rows = concat([run.arrivals for run in longest]).groupby(level=0)
        course = rows[["curve", "average", "tflops", "params", "experts"]].mean()
        course["deviation"] = rows.curve.std().fillna(0.0)
        return course.assign(done=self.first.arrivals.done)


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group runs into experiments, ordered by size of the backbone, learner and waiting time.

    Of two runs with the same settings and seeds, the one with more updates counts.
    """
    groups: dict[str, dict[Any, RecordedRun]] = {}
    for run in sorted(runs, key=lambda run: -len(run.done)):
        groups.setdefault(run.experiment, {}).setdefault(run.seeds, run)
    fewest: dict[str, int] = {}
    for run in runs:
        if updates := _max_update(run):
            fewest[run.size] = min(updates, fewest.get(run.size, updates))
    found = [
        Experiment(of, _max_update(of[0]) / fewest[of[0].size] if _max_update(of[0]) else 1.0)
        for of in (list(group.values()) for group in groups.values())
    ]
    smallest = {run.size: min(_params(other) for other in runs if other.size == run.size) for run in runs}
    found.sort(key=lambda each: (smallest[each.first.size], each.first.size, *_order(each)))
    return _named(found)


def by_size(groups: Sequence[Experiment]) -> dict[str, list[Experiment]]:
    """Return experiments by the size of their backbone, the smallest first."""
    return {
        size: [each for each in groups if each.first.size == size]
        for size in dict.fromkeys(e.first.size for e in groups)
    }


def iid_pairs(groups: Sequence[Experiment]) -> list[tuple[Experiment, Experiment, int]]:
    """Return each i.i.d. control with the learner of the same settings that waits for nothing, and k."""

    def key(each: Experiment) -> tuple[str, str]:
        kept = {
            name: value for name, value in each.first.settings.items() if name not in ("--iid", "--wait", "--drop-rest")
        }
        return each.first.record["learner"], str(sorted(kept.items()))

    eager = {key(e): e for e in groups if not e.first.options.get("iid") and e.first.options["wait"] == 1}
    return [
        (each, eager[key(each)], each.first.options["iid"])
        for each in groups
        if each.first.options.get("iid") and key(each) in eager
    ]


def _max_update(run: RecordedRun) -> int:
    updates = str(run.record["train_options"].get("--max-update", ""))
    return int(updates) if updates.isdecimal() else 0


def _params(run: RecordedRun) -> float:
    return float(run.done.num_params.min()) if len(run.done) else 0.0


def _order(each: Experiment) -> tuple[Any, ...]:
    run, learners = each.first, list(LEARNER_COLOURS)
    name = run.record["learner"]
    rank = learners.index(name) if name in learners else len(learners)
    most = tuple(run.done[["num_members", "num_experts"]].max()) if len(run.done) else (0, 0)
    return rank, run.options["replay"], run.options.get("iid") or 0, run.options["wait"], each.times, *most


def _named(groups: Sequence[Experiment]) -> list[Experiment]:
    """Name each experiment by its label and, as far as needed, by experts, size and the options that differ."""

    def options(each: Experiment, others: Sequence[Experiment]) -> str:
        kept = [name for name in each.first.settings if name not in IMPLIED]
        kept += [name for other in others for name in other.first.settings if name not in IMPLIED]
        differing = [n for n in dict.fromkeys(kept) if len({other.first.settings.get(n) for other in others}) > 1]
        shown = [f"{n} {each.first.settings[n]}" if n in each.first.settings else f"no {n}" for n in differing]
        return ", ".join(shown or [each.first.stream_key[:8]])

    parts: list[Callable[[Experiment], str]] = [
        lambda each: each.label,
        lambda each: f"{each.label}, {_experts(each)}",
        lambda each: f"{each.label}, {each.first.size}",
        lambda each: f"{each.label}, {_experts(each)}, {each.first.size}",
    ]
    named = []
    for each in groups:
        for part in parts:
            rivals = [other for other in groups if part(other) == part(each)]
            if len(rivals) == 1:
                named.append(Experiment(each.runs, each.times, part(each)))
                break
        else:
            named.append(Experiment(each.runs, each.times, f"{parts[1](each)}, {options(each, rivals)}"))
    return named


def _experts(each: Experiment) -> str:
    return each.first.experts if each.first.experts.endswith("models") else f"{each.first.experts} experts"
