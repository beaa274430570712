"""The tables of a report: test values by arrival, over the stream and over seeds; growth; i.i.d. controls."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Callable, Iterator, Optional, Sequence

from pandas import DataFrame

from fairseq_alma.report.experiment import Experiment, controls, experiments, naming_of
from fairseq_alma.report.matrix import matrix_table
from fairseq_alma.report.paper import paper_controls, paper_perplexities
from fairseq_alma.report.read_run import SCALE, RunTable
from fairseq_alma.report.regret import regret_table
from fairseq_alma.report.sentences import said
from fairseq_alma.report.spelling import IMAGES, NOT_YET, TEXT, WAITING, show_count, show_number, show_power
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import NOTHING, Cell, Table, count_cell, mark_best, number_cell, spread_cell

MAX_COLUMNS, FEW_COLUMNS = 20, 10
MAX_GROWTH_ROWS = 30
BITS, AREA, SETTLED = "bits per byte", "bits per byte over FLOPs", "last/first"
FAR = 0.8  # of SETTLED: the paper's single models have 0.91 to 0.93
_three = methodcaller("show", 3)
_SETTLED = ("settled", _three)


@dataclass(frozen=True)
class Measure:
    """How a kind of data is reported: the test value and its sum over arrivals, their titles, decimals and units."""

    name: str
    final: str
    anytime: str
    anytime_digits: int
    scale: float
    per: str
    meaning: str

    def show(self, value: Optional[float]) -> str:
        """Spell a value; ``*`` for None (waiting), ``–`` for NaN (not run yet)."""
        return show_number(None if value is None else value * self.scale, 2)

    def show_spread(self, spread: Spread) -> str:
        """Spell seed mean ± std of a value."""
        return spread.show(2, self.scale)

    def unit(self, before: str, after: str = "") -> str:
        """Return ``in percent`` between what stands before and after it, where values are in percent."""
        return "" if self.scale == 1 else f"{before}in percent{after}"


MEASURES = {
    TEXT: Measure(
        "perplexity", "final PPL", "avg PPL", 2, SCALE[TEXT], "token", "mean test perplexity over all arrivals"
    ),
    IMAGES: Measure(
        "error", "final error", "CER", 1, SCALE[IMAGES], "image",
        "sum of the test error over all arrivals, in percent points; final error in percent",
    ),
}  # fmt: skip


def all_tables(runs: RunTable, paper: bool = False) -> list[Table]:
    """Return every table that the runs allow; text and images have tables of their own, the paper's numbers too."""
    tables: dict[str, Table] = {}
    for kind, measure in MEASURES.items():
        of_kind = runs.where(runs.facts.kind == kind)
        groups = experiments(of_kind)
        if not groups:
            continue
        found = [arrival_table(of_kind, groups, measure), summary_table(groups, measure), seed_table(groups, measure)]
        found += [iid_table(groups, measure), regret_table(groups), matrix_table(groups)]
        found += [growth_table(of_kind, groups, measure), evaluation_table(of_kind, groups, measure)]
        if paper and kind == TEXT:
            found += [paper_perplexities(groups), paper_controls(groups)]
        for table in found:
            name = table.name if table.name not in tables else f"{table.name}_{kind}"
            if len(table.cells):
                tables[name] = replace(table, name=name)
    return list(tables.values())


def _rows_of_runs(
    runs: RunTable, groups: Sequence[Experiment]
) -> Iterator[tuple[Experiment, Any, dict[str, Any], DataFrame]]:
    """Yield for each run its experiment, its facts, what names it in a row, its arrivals; ordered as experiments."""
    naming, has_seeds = naming_of(groups), runs.facts.seed.nunique() > 1
    of_settings = {each.first.settings: (rank, each) for rank, each in enumerate(groups)}
    arrivals = dict(iter(runs.arrivals.groupby("run")))
    for run in sorted(runs.facts.itertuples(), key=lambda run: (of_settings[run.settings][0], run.seed)):
        experiment = of_settings[run.settings][1]
        names = naming(experiment)
        names |= {list(names)[-1]: run.experts, **({"seed": Cell(str(run.seed), run.seed)} if has_seeds else {})}
        yield experiment, run, names, arrivals[run.Index]


def shown_arrivals(num_arrivals: int) -> list[int]:
    """Return the arrivals that people are shown: all of a few, the last of each tenth of many."""
    if num_arrivals <= MAX_COLUMNS:
        return list(range(num_arrivals))
    return [round(num_arrivals * part / FEW_COLUMNS) - 1 for part in range(1, FEW_COLUMNS + 1)]


def _arrival_titles(num_arrivals: int) -> tuple[list[str], set[str]]:
    """Return the titles of all arrivals, and those that only programs get."""
    titles, shown = [f"t{arrival}" for arrival in range(num_arrivals)], shown_arrivals(num_arrivals)
    return titles, set(titles) - {titles[arrival] for arrival in shown}


def arrival_table(runs: RunTable, groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out the test value of each run after each mega-batch, a row for each run, as in the paper's Table 2."""
    titles, hidden = _arrival_titles(runs.facts.num_arrivals.max())
    rows, on_streams, at_the_end = [], [], []
    for _, run, names, own in _rows_of_runs(runs, groups):
        row = names | {"params": count_cell(run.shown_params, run.num_params)} | _values(titles, own, measure)
        row[measure.anytime] = number_cell(run.anytime, measure.anytime_digits)
        row[measure.final] = Cell(measure.show(run.final), run.final)
        row |= {BITS: number_cell(run.bits_per_byte, 3), SETTLED: number_cell(run.settled, 3)} if run.is_text else {}
        row["train FLOPs"] = Cell(show_power(run.computation), run.computation)
        rows.append(row | {"run": run.shown_path})
        on_streams += [] if run.iid else rows[-1:]
        # Sums over streams of other lengths do not compare, nor does the value of a run that is still going.
        is_at_the_end = run.is_complete and run.num_arrivals == len(titles) and not run.iid
        at_the_end += rows[-1:] if is_at_the_end else []
    mark_best(on_streams, set(titles) - hidden)
    mark_best(at_the_end, [title for title in (measure.anytime, measure.final, BITS) if title in rows[0]])
    return Table(measure.name, *said(measure.name, **_settling(groups)), DataFrame(rows), hidden)


def summary_table(groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out what each experiment comes to over the stream: CER or average perplexity, Mem, Comp, final value.

    An i.i.d. control, which learns from no stream, is left out.
    """
    naming, of_text = naming_of(groups), {BITS: ("bits_per_byte", _three), AREA: ("area", _three), SETTLED: _SETTLED}
    columns: dict[str, tuple[str, Callable[[Spread], str]]] = {
        measure.anytime: ("anytime", lambda spread: spread.show(measure.anytime_digits)),
        measure.final: ("final", measure.show_spread),
        "Mem": ("memory", lambda spread: show_count(spread.mean)),
        "Comp": ("computation", lambda spread: show_power(spread.mean)),
        f"test FLOPs/{measure.per}": ("test_flops", lambda spread: show_count(spread.mean)),
        **(of_text if groups[0].first.is_text else {}),
        "hours": ("hours", lambda spread: spread.show(2)),
    }
    rows, on_stream = [], [each for each in groups if not each.first.iid]
    for experiment in on_stream:
        complete, total = len(experiment.complete), len(experiment.runs)
        seeds = Cell(f"{total}" if complete == total else f"{complete} of {total}", complete)
        cells = {title: spread_cell(experiment.spread(column), show) for title, (column, show) in columns.items()}
        rows.append({**naming(experiment), "seeds": seeds, **cells})
    longest = max(each.first.num_arrivals for each in groups)  # sums over streams of other lengths do not compare
    alike = [row for row, each in zip(rows, on_stream, strict=True) if each.first.num_arrivals == longest]
    mark_best(alike, [title for title in columns if title not in (SETTLED, "hours")])
    return Table("summary", *said("summary", measure=measure, **_settling(groups)), DataFrame(rows))


def _settling(groups: Sequence[Experiment]) -> dict[str, Any]:
    """Return what is said of the column `SETTLED`: of which single models, that they began far from converged.

    What tells learners apart there may be how fast they learn, which is gone once they have; models that grow get
    better by that too.
    """
    single = [each for each in groups if each.first.learner == "sm" and not each.first.iid]
    found = [(each, settled) for each in single if (settled := each.spread("settled")) is not None]
    far = [f"{each.name} ({settled.mean:.2f})" for each, settled in found if settled.mean < FAR]
    return {"is_text": groups[0].first.is_text, "far": far, "limit": f"{FAR:g}"}


def seed_table(groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out seed mean ± std after each mega-batch, a row for each experiment with two complete runs or more."""
    several = [experiment for experiment in groups if len(experiment.complete) > 1]
    naming = naming_of(several)
    titles, hidden = _arrival_titles(max(experiment.first.num_arrivals for experiment in groups))
    rows = []
    for experiment in several:
        params, complete = count_cell(experiment.first.shown_params, experiment.first.num_params), experiment.complete
        row = {**naming(experiment), "params": params, "seeds": Cell(str(len(complete)), len(complete))}
        done, seeds = experiment.arrivals[experiment.arrivals.done], dict(complete.seeds)
        found: dict[int, dict[Any, float]] = defaultdict(dict)
        for arrival, run, value in zip(done.arrival, done.run, done.value, strict=True):
            if run in seeds:
                found[arrival][seeds[run]] = value
        cells = {
            title: spread_cell(Spread.of(found[t]), measure.show_spread, WAITING) for t, title in enumerate(titles)
        }
        if experiment.first.is_text:
            cells[SETTLED] = spread_cell(experiment.spread(_SETTLED[0]), _SETTLED[1])
        rows.append(row | cells)
    on_streams = [row for row, experiment in zip(rows, several, strict=True) if not experiment.first.iid]
    mark_best(on_streams, set(titles) - hidden)
    texts = said("seeds", measure=measure, **_settling(groups))
    return Table("seeds", *texts, DataFrame(rows), hidden, mean="{} mean")


def iid_table(groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out what learning sequentially costs, as in the paper's Table 1: a row for each learner with a control."""
    found = controls(groups)
    naming, ks = naming_of([sequential for sequential, _ in found]), sorted({k for _, each in found for k in each})
    rows = []
    for sequential, pairs in found:
        row = naming(sequential)
        for k in ks:
            for how, spread in zip(("iid", "seq."), pairs.get(k, (None, None)), strict=True):
                row[f"k={k} {how}"] = spread_cell(spread, measure.show_spread)
        rows.append(row)
    return Table("iid", *said("iid", measure=measure), DataFrame(rows))


def growth_table(runs: RunTable, groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out what growth did to the value on the validation set, and the training that followed.

    A row for each growth step; where there are many, one for each run with the means over its steps.
    """
    titles = {"before": "before_growth", "after growth": "after_growth", "after training": "valid"}
    steps, means = [], []
    for experiment, run, _, own in _rows_of_runs(runs, groups):
        name = f"{experiment.label}, {experiment.size}".removesuffix(", ")

        def row(at: str, experts: str, values: Any, name: str = name, run: Any = run) -> dict[str, Any]:
            cells = {title: Cell(measure.show(values[column]), values[column]) for title, column in titles.items()}
            return {"learner": name, "at": at, "experts": experts, **cells, "run": run.shown_path}

        if own.after_growth.isna().all():
            continue
        done = own[own.done]
        done = done.assign(earlier=done.num_experts.shift())
        grown = done.dropna(subset=["before_growth", "after_growth", "earlier"])
        for step in grown.to_dict("records"):
            steps.append(row(f"t{step['arrival']}", f"{step['earlier']:.0f} to {step['num_experts']:.0f}", step))
        if len(grown):
            means.append(row(f"{len(grown)} steps", run.experts, grown[list(titles.values())].mean()))
    shown = steps if len(steps) <= MAX_GROWTH_ROWS else means
    texts = said("growth", measure=measure, are_means=shown is not steps)
    return Table("growth", *texts, DataFrame(shown), plain=DataFrame(steps))


def evaluation_table(runs: RunTable, groups: Sequence[Experiment], measure: Measure) -> Table:
    """Lay out what ``--then-evaluate`` said of each update, below the test value: a row for each figure of a run."""
    titles, hidden = _arrival_titles(runs.facts.num_arrivals.max())
    rows = []

    def show(value: float) -> str:
        return NOT_YET if math.isnan(value) else f"{value:.5g}"

    for _, run, names, own in _rows_of_runs(runs, groups):
        found = [each["figures"] if isinstance(each, dict) else {} for each in own.evaluation]
        figures = dict.fromkeys(name for each in found for name in each)
        names |= {"seed": str(run.seed)} if "seed" in names else {}
        values = _values(titles, own, measure)
        shown = {measure.name: values} if figures else {}
        for figure in figures:
            told = [each.get(figure, math.nan) for each in found]
            shown[figure] = values | {
                title: Cell(WAITING if values[title].text == WAITING else show(value), value)
                for title, value in zip(titles, told, strict=False)
            }
        rows += [{**names, "figure": figure, **cells, "run": run.shown_path} for figure, cells in shown.items()]
    return Table("evaluation", *said("evaluation", measure=measure), DataFrame(rows), hidden)


def _values(titles: Sequence[str], own: DataFrame, measure: Measure) -> dict[str, Cell]:
    """Return the test value of a run after each arrival, `NOTHING` beyond its stream."""
    updates = zip(titles, own.value, own.planned | own.done, strict=False)
    shown = {title: Cell(measure.show(value if is_update else None), value) for title, value, is_update in updates}
    return dict.fromkeys(titles, NOTHING) | shown
