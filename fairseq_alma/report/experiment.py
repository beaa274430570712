"""Runs that differ by their seeds alone are one experiment; here they find each other, and get names that tell them.

The paper names learner and waiting time (``SM_w3``); what else tells the experiments of a report apart (steps, size of
the backbone, any other option) is worked out from the whole set.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from pandas import DataFrame, concat

from fairseq_alma.report.finding import Spread
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import LEARNER_COLOURS, MAX_UPDATE, PLACE_AND_PACE, experiment_key
from fairseq_alma.runs.study import FREE_OPTIONS

# They follow from other options, or say where and how fast something runs, not what comes out.
UNTOLD_OPTIONS = (MAX_UPDATE, "--total-num-update", "--jobs", *PLACE_AND_PACE)


@dataclass(frozen=True, eq=False)
class Experiment:
    """One learner with all its settings, over any number of seeds.

    Attributes:
        runs: their facts, with distinct seeds, the furthest one first; ``arrivals`` are theirs.
        first: the facts of that one; what all seeds share can be read off it.
        label: the learner and its variant: ``SM_w3 (3x steps)``.
        times: updates per stage, of the fewest that an experiment with this backbone has; 1 where nothing is said.
        size: of the backbone; empty where all experiments of the report have the same.
        note: what else tells it from others of the same label, size and experts; mostly empty.
    """

    runs: DataFrame
    first: Any
    arrivals: DataFrame
    label: str
    times: float = 1.0
    size: str = ""
    note: str = ""

    @cached_property
    def complete(self) -> DataFrame:
        """The runs that made all their updates."""
        return self.runs[self.runs.is_complete]

    @cached_property
    def name(self) -> str:
        """Everything that tells it apart: ``SM_w1, 4 experts, width 64``."""
        return ", ".join(part for part in (self.label, self._parts, self.size, self.note) if part)

    @property
    def _parts(self) -> str:
        """What a model is made of: ``4 experts``, ``4@1 to 4@4 experts``, ``5 models``; empty for a single one."""
        sizes = self.first.experts.removesuffix(" models").split(", ")
        text = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        unit = "models" if self.first.experts.endswith(" models") else "experts"
        return "" if text in ("1", "–") else f"{text} {unit}"

    def spread(self, column: str) -> Optional[Spread]:
        """Return mean and deviation of a fact over the complete runs, or None where none has it."""
        return Spread.of(dict(zip(self.complete.seeds, self.complete[column], strict=True)))

    def at(self, arrival: int) -> Optional[Spread]:
        """Return mean and deviation of the test value right after the update at an arrival."""
        rows = self.arrivals[self.arrivals.arrival == arrival]
        return Spread.of({self.runs.seeds[run]: value for run, value in zip(rows.run, rows.value, strict=True)})

    def settings_but(self, *names: str) -> str:
        """Spell what it shares with experiments that differ in these options alone."""
        learner, options, *others = json.loads(self.first.settings)
        return json.dumps([learner, {name: each for name, each in options.items() if name not in names}, *others])

    @cached_property
    def course(self) -> DataFrame:
        """Means over the runs that got furthest, as far as they got: a row for each arrival.

        Means over runs that end at different arrivals would jump where one ends. ``deviation`` (n - 1) of the curve is
        0 for one seed, and where a run diverged.
        """
        furthest = self.runs[self.runs.num_known == self.runs.num_known.max()]
        is_known = self.arrivals.arrival < self.runs.num_known.max()
        rows = self.arrivals[self.arrivals.run.isin(furthest.index) & is_known]
        by_arrival = rows.groupby("arrival")
        course = by_arrival[["curve", "average", "tflops", "params", "experts"]].mean()
        spread = rows.curve.where(abs(rows.curve) < float("inf")).groupby(rows.arrival)
        course["deviation"] = spread.std().where(spread.count() == len(furthest)).fillna(0.0)
        return course.assign(done=rows[rows.run == furthest.index[0]].set_index("arrival").done)


def sizes_in_order(runs: DataFrame) -> list[str]:
    """Return the sizes of backbone from the smallest to the largest; those of runs without an update come first.

    By the parameters of their smallest single models, where each size has one; else of their smallest models.
    """
    begun = runs[runs.num_done > 0]
    smallest = begun.groupby("backbone", sort=False).min_params.min()
    singles = begun[begun.learner == "sm"].groupby("backbone", sort=False).min_params.min()
    chosen = singles if len(singles) == len(smallest) else smallest
    return [*sorted(set(runs.backbone) - set(chosen.index)), *chosen.sort_values(kind="stable").index]


def experiments(table: RunTable) -> list[Experiment]:
    """Gather runs into experiments, ordered by size, learner, waiting time and number of experts.

    Of two runs with the same settings and seeds, the one counts that has got further.
    """
    if not len(table.facts):
        return []
    furthest_first = table.facts.sort_values("num_done", ascending=False, kind="stable")
    kept = furthest_first.drop_duplicates(["settings", "seeds"])
    least, several_sizes = table.facts.groupby("backbone").max_update.min(), table.facts.backbone.nunique() > 1
    arrivals, seeds_of = dict(iter(table.arrivals.groupby("run"))), dict(iter(kept.groupby("settings")))
    facts = {run.Index: run for run in table.facts.itertuples()}
    found = []
    for settings in table.facts.settings.unique():
        runs = seeds_of[settings]
        first = facts[runs.index[0]]
        times = 1.0 if first.max_update != first.max_update else first.max_update / least[first.backbone]
        rows = arrivals[first.Index] if len(runs) == 1 else concat([arrivals[index] for index in runs.index])
        label = first.label + ("" if times == 1 else f" ({times:.3g}x steps)")  # as Table 2 spells it
        found.append(Experiment(runs, first, rows, label, times, first.backbone if several_sizes else ""))
    sizes = {size: rank for rank, size in enumerate(sizes_in_order(table.facts))}
    found.sort(key=lambda experiment: (sizes[experiment.first.backbone], *_order(experiment)))
    return list(_with_notes(found))


def _order(experiment: Experiment) -> tuple[Any, ...]:
    """Return what experiments over one backbone are sorted by."""
    run, learners = experiment.first, list(LEARNER_COLOURS)
    rank = learners.index(run.learner) if run.learner in learners else len(learners)
    return (
        rank, run.replay, run.iid, run.wait, experiment.times, experiment.label, run.max_members, run.max_experts,
    )  # fmt: skip


def _with_notes(found: Sequence[Experiment]) -> Iterator[Experiment]:
    """Tell apart experiments that would have the same name by the options in which they differ."""
    facts = defaultdict(list)
    for experiment in found:
        facts[experiment.name].append(_options(experiment.first))
    for experiment in found:
        own, others = _options(experiment.first), facts[experiment.name]
        differing = [name for name in own if len({other.get(name) for other in others}) > 1]
        yield replace(experiment, note=", ".join(_spell(name, own[name]) for name in differing))


def _options(run: Any) -> dict[str, str]:
    options = {f"--{name.replace('_', '-')}": value for name, value in run.options.items() if name not in FREE_OPTIONS}
    chosen = {**options, **run.train_options}
    # Where streams are mixed; seeds of a stream of images are no difference.
    stream = f"{run.stream.get('dataset') or Path(run.stream['path']).name} {str(experiment_key(run.stream)[0])[:8]}"
    told = {name: str(value) for name, value in chosen.items() if name not in UNTOLD_OPTIONS}
    return told | {"stream": stream, "mega-batches": str(run.num_arrivals)}


def _spell(name: str, value: str) -> str:
    return f"no {name}" if value in ("None", "False") else f"{name} {value}".removesuffix(" True").strip()


def names_of(groups: Sequence[Experiment]) -> list[str]:
    """Name experiments as briefly as tells them apart: by learner and wait, or with their experts, or by everything."""
    ways: tuple[Callable[[Experiment], str], ...] = (
        lambda each: each.label, lambda each: replace(each, size="", note="").name,
        lambda each: f"{each.label}, {each.size}".removesuffix(", "), lambda each: replace(each, size="").name,
    )  # fmt: skip
    spelled = [[way(each) for each in groups] for way in ways]
    found = (
        next((all_[i] for all_ in spelled if all_.count(all_[i]) == 1), each.name) for i, each in enumerate(groups)
    )
    return list(found)


def naming_of(groups: Sequence[Experiment]) -> Callable[[Experiment], dict[str, Any]]:
    """Return what names an experiment in a table of these: without columns that would say the same in every row."""
    told = {"learner": "label", "size": "size", "options": "note"}
    told = {
        title: name for title, name in told.items() if name == "label" or len({getattr(x, name) for x in groups}) > 1
    }
    last = "experts" if all(each.first.is_text for each in groups) else "experts or models"
    return lambda each: {title: getattr(each, name) for title, name in told.items()} | {last: each.first.experts}


def by_size(groups: Sequence[Experiment]) -> dict[str, list[Experiment]]:
    """Sort experiments by the size of their backbone, the smallest first."""
    sizes = sizes_in_order(concat([group.runs for group in groups])) if groups else []
    return {size: [group for group in groups if group.first.backbone == size] for size in sizes}


def begun(runs: RunTable) -> list[Experiment]:
    """Return the experiments whose curve has begun: those of runs with a first update."""
    return experiments(runs.where(runs.facts.first_done < runs.facts.num_known))


def completed(groups: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments that learned from a whole stream, which the i.i.d. controls do not."""
    return [group for group in groups if len(group.complete) and not group.first.iid]


def controls(groups: Sequence[Experiment]) -> list[tuple[Experiment, dict[int, tuple[Spread, Spread]]]]:
    """Find what waits for nothing and has i.i.d. controls (``--iid K``): test values i.i.d. and sequential, by k."""
    eager = [each for each in groups if not each.first.iid and each.first.wait == 1 and not each.first.replay]
    sequential = {each.settings_but("iid", "wait", "drop_rest"): each for each in eager}
    found: dict[str, dict[int, tuple[Spread, Spread]]] = defaultdict(dict)
    for control in groups:
        k, key = control.first.iid, control.settings_but("iid", "wait", "drop_rest")
        if k and key in sequential:
            iid, other = control.at(k - 1), sequential[key].at(k - 1)
            found[key] |= {k: (iid, other)} if iid is not None and other is not None else {}
    return [(each, dict(sorted(found[key].items()))) for key, each in sequential.items() if key in found]
