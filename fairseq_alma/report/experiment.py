"""Runs that differ by their seeds alone are one experiment; here they find each other, and get names that tell them.

The paper names learner and waiting time (``SM_w3``); what else tells the experiments of a report apart (steps, size of
the backbone, any other option) is worked out from the whole set.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from fairseq_alma.report.run_figures import NAMES, RunFigures, experiment_of
from fairseq_alma.report.sizes import sizes_in_order
from fairseq_alma.report.spread import Spread
from fairseq_alma.runs.run_record import FREE_OPTIONS

MAX_UPDATE = "--max-update"
# They follow from other options, or say where and how fast something runs, not what comes out.
UNTOLD_OPTIONS = (MAX_UPDATE, "--total-num-update", "--num-workers", "--cpu")


@dataclass(frozen=True)
class Experiment:
    """One learner with all its settings, over any number of seeds.

    Attributes:
        runs: with distinct seeds, the furthest one first.
        label: the learner and its variant: ``SM_w3 (3x steps)``.
        times: updates per stage, of the fewest that an experiment with this backbone has; 1 where nothing is said.
        size: of the backbone; empty where all experiments of the report have the same.
        note: what else tells it from others of the same label, size and experts; mostly empty.
    """

    runs: tuple[RunFigures, ...]
    label: str
    times: float = 1.0
    size: str = ""
    note: str = ""

    @property
    def first(self) -> RunFigures:
        """The run that has got furthest; what all seeds share can be read off it."""
        return self.runs[0]

    @property
    def complete(self) -> tuple[RunFigures, ...]:
        """The runs that made all their updates."""
        return tuple(run for run in self.runs if run.is_complete)

    @property
    def name(self) -> str:
        """Everything that tells it apart: ``SM_w1, 4 experts, width 64``."""
        return ", ".join(part for part in (self.label, _parts(self.first), self.size, self.note) if part)

    def spread(self, figure: Callable[[RunFigures], Optional[float]]) -> Optional[Spread]:
        """Return mean and deviation of a figure over the complete runs, or None where none has it."""
        return Spread.of({run.seeds: figure(run) for run in self.complete})

    def at(self, arrival: int) -> Optional[Spread]:
        """Return mean and deviation of the test value right after the update at an arrival."""
        return Spread.of({run.seeds: run.value.get(arrival) for run in self.runs})


def experiments(runs: Sequence[RunFigures]) -> list[Experiment]:
    """Gather runs into experiments, ordered by size, learner, waiting time and number of experts.

    Args:
        runs: any; of two runs with the same settings and seeds, the one counts that has got further.
    """
    groups: dict[str, dict[object, RunFigures]] = {}
    for run in runs:
        group = groups.setdefault(run.settings, {})
        known = group.get(run.seeds)
        if known is None or len(known.value) < len(run.value):
            group[run.seeds] = run
    least, several_sizes = _least_updates(runs), len({run.size for run in runs}) > 1
    found = []
    for group in groups.values():
        furthest_first = sorted(group.values(), key=lambda run: -len(run.value))
        first = furthest_first[0]
        updates = _max_update(first)
        times = 1.0 if updates is None else updates / least[first.size]
        size = first.size if several_sizes else ""
        found.append(Experiment(tuple(furthest_first), first.label + _steps(times), times, size))
    sizes = {size: rank for rank, size in enumerate(sizes_in_order(runs))}
    found.sort(key=lambda experiment: (sizes[experiment.first.size], *_order(experiment)))
    return list(_with_notes(found))


def _order(experiment: Experiment) -> tuple[Any, ...]:
    """Return what experiments over one backbone are sorted by."""
    run, learners = experiment.first, list(NAMES)
    rank = learners.index(run.learner) if run.learner in learners else len(learners)
    counts = max(run.num_members.values(), default=0), max(run.num_experts.values(), default=0)
    return rank, run.replay, run.iid or 0, run.wait, experiment.times, experiment.label, *counts


def _least_updates(runs: Sequence[RunFigures]) -> dict[str, int]:
    """Return the smallest ``--max-update`` at each size of backbone."""
    least: dict[str, int] = {}
    for run in runs:
        updates = _max_update(run)
        if updates is not None:
            least[run.size] = min(updates, least.get(run.size, updates))
    return least


def _max_update(run: RunFigures) -> Optional[int]:
    given = str(run.train_options.get(MAX_UPDATE, ""))
    return int(given) if given.isdecimal() and int(given) > 0 else None


def _steps(times: float) -> str:
    """Spell a multiple of the updates per stage as Table 2 does: `` (3x steps)``."""
    return "" if times == 1 else f" ({times:.3g}x steps)"


def _parts(run: RunFigures) -> str:
    """Spell what a model is made of: ``4 experts``, ``4@1 to 4@4 experts``, ``5 models``; empty for a single one."""
    sizes, unit = run.experts.removesuffix(" models").split(", "), "experts"
    if run.experts.endswith(" models"):
        unit = "models"
    text = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return "" if text in ("1", "–") else f"{text} {unit}"


def _with_notes(found: Sequence[Experiment]) -> Iterator[Experiment]:
    """Tell apart experiments that would have the same name by the options in which they differ."""
    groups: dict[str, list[Experiment]] = {}
    for experiment in found:
        groups.setdefault(experiment.name, []).append(experiment)
    for experiment in found:
        others = groups[experiment.name]
        if len(others) == 1:
            yield experiment
            continue
        facts = [_facts(other.first) for other in others]
        differing = [name for name in _facts(experiment.first) if len({fact.get(name) for fact in facts}) > 1]
        own = _facts(experiment.first)
        yield replace(experiment, note=", ".join(_spell(name, own[name]) for name in differing))


def _facts(run: RunFigures) -> dict[str, str]:
    options = {f"--{name.replace('_', '-')}": value for name, value in run.options.items() if name not in FREE_OPTIONS}
    chosen = {**options, **run.train_options}
    facts = {name: str(value) for name, value in chosen.items() if name not in UNTOLD_OPTIONS}
    # Where streams are mixed; seeds of a stream of images are no difference.
    name = run.stream.get("dataset") or Path(run.stream["path"]).name
    return {**facts, "stream": f"{name} {str(experiment_of(run.stream)[0])[:8]}"}


def _spell(name: str, value: str) -> str:
    if value in ("None", "False"):
        return f"no {name}"
    return f"{name} {value}".removesuffix(" True").strip()
