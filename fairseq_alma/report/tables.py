"""The tables of a report: test values by arrival, over stream and seeds; growth; i.i.d. controls; matrix; regret.

The matrix says what a model knows of each mega-batch after each arrival, what of it is memorised, and what is forgotten
again: a slice of each is held out, and as much of what is trained on is tested too (``alma-stream --matrix``).

Regret is what a learner that learns sequentially loses, at each arrival, against retraining on all so far. The oracle
of arrival t is an i.i.d. control (``--iid``) on the first t + 1 mega-batches, over the same backbone, with no fewer
parameters and as many updates or epochs for each mega-batch; of several, with other learning rates for instance, the
one with the lowest figure on valid. Regrets are differences of test losses in nats over seeds that both have.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import numpy as np
from pandas import DataFrame

from fairseq_alma.metrics import updates_for_loss
from fairseq_alma.options import TRAINING, options_of
from fairseq_alma.report.experiment import Experiment, controls, experiments, naming_of
from fairseq_alma.report.finding import Comparison, Finding, Spread, half_width
from fairseq_alma.report.paper import paper_controls, paper_perplexities
from fairseq_alma.report.read_run import SCALE, RunTable
from fairseq_alma.report.spelling import (
    IMAGES,
    MAX_UPDATE,
    NOT_YET,
    NOTHING,
    TEXT,
    WAITING,
    Cell,
    Table,
    count_cell,
    interval_cell,
    mark_best,
    number_cell,
    said,
    show_count,
    show_number,
    show_power,
    spread_cell,
)
from fairseq_alma.training.feature import FEATURES

NO_LESS = 0.98  # share of a run's parameters that a control must have
MARGIN = math.log(1.01)  # 1 % of perplexity, in nats
CLAIM = (
    "Anytime training (a carried optimizer, an average or a branch) is as good as retraining: at every arrival the "
    "95 % interval of its perplexity over that of the i.i.d. control lies below 1 %; of each run, the arrival that "
    "decides is named."
)
NEEDED = (
    "runs with options of anytime training beside controls of their size and updates at every arrival (--iid 1, "
    "2, ...), two seeds or more of each"
)


def regret_table(groups: Sequence[Experiment]) -> Table:
    """Lay out the regret of each sequential learner that has an oracle, a row for each; all over one kind of data."""
    found = [(each, pairs) for each in groups if not each.first.iid and (pairs := _pairs(each, groups))]
    naming = naming_of([each for each, _ in found])
    arrivals = sorted({arrival for _, pairs in found for arrival in pairs})
    rows = []
    for each, pairs in found:
        gaps = {arrival: gap for arrival, (own, best, _) in pairs.items() if (gap := _gap(best, own)) is not None}
        cells = {f"t{arrival}": interval_cell(gaps.get(arrival)) for arrival in arrivals}
        rows.append({**naming(each), **cells, "sum": interval_cell(_sum(list(gaps.values())))})
        made = each.arrivals[each.arrivals.run == each.runs.index[0]].set_index("arrival").num_updates.loc[: max(pairs)]
        points = [(updates, best.mean) for _, best, updates in pairs.values()]
        multiplier = compute_multiplier(points, pairs[max(pairs)][0].mean, made.sum())
        rows[-1]["compute multiplier"] = NOTHING if multiplier is None else Cell(f"{multiplier:.2f}", multiplier)
    return Table("regret", *said("regret"), DataFrame(rows))


def compute_multiplier(oracle: Sequence[tuple[float, float]], loss: float, updates: float) -> Optional[float]:
    """Return how many times its own updates the oracle needs for a learner's loss; None: its losses do not tell.

    Args:
        oracle: updates of each control and its loss, in the order of the arrivals.
        loss: of the learner after its last update, in nats.
        updates: that it has made in all.
    """
    needed = updates_for_loss(oracle, loss) if len(oracle) > 1 else None
    return None if needed is None else needed / updates


def regret_finding(groups: Sequence[Experiment]) -> Optional[Finding]:
    """Say whether anytime training of text is as good as retraining, at every arrival.

    Experiments with an update that has no control say nothing; but for one at t0, where there was nothing before. Of
    each other the arrival counts that decides: one whose interval lies above the margin, else the one whose interval
    reaches highest. None: no run has options of anytime training.
    """
    ours = [each for each in groups if not each.first.iid and _is_anytime(each)]
    comparisons = []
    for each in ours:
        pairs = _pairs(each, groups)
        planned = each.arrivals[each.arrivals.planned].arrival
        if pairs and set(planned) - {0} <= pairs.keys():
            found = [_against_margin(each, arrival, own, best) for arrival, (own, best, _) in pairs.items()]
            comparisons.append(max(found, key=_deciding))
    return Finding(CLAIM, "not of the paper", NEEDED, comparisons) if ours else None


def _is_anytime(experiment: Experiment) -> bool:
    given = experiment.first.options
    offered = [option for kind in FEATURES for option in options_of(kind).values() if option.side != TRAINING]
    return any(given.get(option.name) is not None for option in offered if "text" in option.kinds)


def _against_margin(each: Experiment, arrival: int, own: Spread, best: Spread) -> Comparison:
    """Compare a loss with that of retraining and the margin: it is lower where the regret's interval is below this."""
    limit = Spread.of({seed: loss + MARGIN for seed, loss in best.by_seed.items()})
    assert limit is not None
    what = f"test loss after t{arrival}, nats"
    return Comparison(each.name, f"retraining + {MARGIN:.5f}", own, limit, what, digits=4)


def _deciding(comparison: Comparison) -> tuple[bool, float]:
    """Rank comparisons by how much they speak against the claim: contradictions first, then by the upper bound."""
    gap = _gap(comparison.high, comparison.low)
    if gap is None:
        return comparison.outcome < 0, comparison.low.mean - comparison.high.mean
    return comparison.outcome < 0, gap.mean + (half_width(gap) or 0.0)


def _losses(experiment: Experiment, arrival: int, column: str) -> Optional[Spread]:
    """Return a loss at an arrival, in nats, over seeds; of text from perplexities, which have more digits."""
    rows = experiment.arrivals[(experiment.arrivals.arrival == arrival) & experiment.arrivals.done]
    is_text = experiment.first.is_text
    values = rows[{"test": "value", "valid": "valid"}[column] if is_text else "loss"]
    seeds = (experiment.runs.seeds[run] for run in rows.run)
    return Spread.of(dict(zip(seeds, map(math.log, values) if is_text else values, strict=True)))


def _pairs(each: Experiment, groups: Sequence[Experiment]) -> dict[int, tuple[Spread, Spread, float]]:
    """Return by arrival the test losses of an experiment and of its oracle, and the updates of the oracle."""
    found = {}
    for arrival in sorted({control.first.iid - 1 for control in groups if control.first.iid}):
        own, oracle = _losses(each, arrival, "test"), _oracle(each, arrival, groups)
        best = None if oracle is None else _losses(oracle, arrival, "test")
        if own is not None and oracle is not None and best is not None:
            found[arrival] = own, best, float(oracle.arrivals[oracle.arrivals.done].num_updates.iloc[0])
    return found


def _oracle(each: Experiment, arrival: int, groups: Sequence[Experiment]) -> Optional[Experiment]:
    """Return the best of the controls at an arrival, over the same backbone and stream, that are no weaker."""
    same = [
        (valid.mean, rank, control)
        for rank, control in enumerate(groups)
        if control.first.iid == arrival + 1
        and _trained_alike(control.first) == _trained_alike(each.first)
        and _num_params(control, arrival) >= NO_LESS * _num_params(each, arrival)
        and (valid := _losses(control, arrival, "valid")) is not None
    ]
    return min(same)[2] if same else None


def _trained_alike(run: Any) -> tuple[Any, ...]:
    """Return what a run and its controls share: stream, backbone, and the updates or epochs for each mega-batch."""
    lengths = (run.train_options.get(name) for name in (MAX_UPDATE, "--max-epoch"))
    return run.stream_key, run.backbone, *lengths


def _num_params(experiment: Experiment, arrival: int) -> float:
    """Return how many parameters predict after an arrival."""
    rows = experiment.arrivals[experiment.arrivals.done & (experiment.arrivals.arrival <= arrival)]
    return float(rows.num_params.max()) if len(rows) else 0.0


def _gap(best: Spread, own: Spread) -> Optional[Spread]:
    """Return the regret over shared seeds, be it a single one."""
    return Spread.of({seed: own.by_seed[seed] - best.by_seed[seed] for seed in own.by_seed if seed in best.by_seed})


def _sum(gaps: Sequence[Spread]) -> Optional[Spread]:
    """Return the sum over arrivals for each seed that has all of them."""
    seeds = [seed for seed in (gaps[0].by_seed if gaps else ()) if all(seed in gap.by_seed for gap in gaps)]
    return Spread.of({seed: sum(gap.by_seed[seed] for gap in gaps) for seed in seeds})


HELD_OUT, TRAINED_ON = "held_out", "training"
SHOWN = {HELD_OUT: "held-out", TRAINED_ON: "training"}
Matrix = Mapping[int, np.ndarray]
"""Arrival of an update -> (B,) losses in nats."""


def matrices_of(experiment: Experiment) -> dict[Any, dict[str, Matrix]]:
    """Return the losses on both slices of each mega-batch, by seed; seeds without any are left out."""
    rows = experiment.arrivals[experiment.arrivals.matrix.notna()]
    found: dict[Any, dict[str, Matrix]] = {}
    for run, own in rows.groupby("run"):
        told = dict(zip(own.arrival, own.matrix, strict=True))
        found[experiment.runs.seeds[run]] = {
            name: {arrival: math.log(2) * np.array(each[name]) for arrival, each in told.items()} for name in SHOWN
        }
    return found


def mean_matrix(matrices: Mapping[Any, Mapping[str, Matrix]], name: str) -> Matrix:
    """Return the means over seeds at the arrivals that all of them have, over the mega-batches that all of them had."""
    each = [matrix[name] for matrix in matrices.values()]
    arrivals = sorted(set.intersection(*map(set, each)))
    size = min(len(row) for matrix in each for row in matrix.values())
    return {arrival: np.mean([matrix[arrival][:size] for matrix in each], axis=0) for arrival in arrivals}


def memorised(matrix: Mapping[str, Matrix], arrival: int) -> float:
    """Return the held-out minus the training loss after an arrival, mean over what has arrived."""
    gap = matrix[HELD_OUT][arrival] - matrix[TRAINED_ON][arrival]
    return float(gap[: arrival + 1].mean())


def forgotten(matrix: Matrix, arrival: int) -> Optional[float]:
    """Return the rise of the loss since right after each mega-batch's own stage, mean over those of earlier stages."""
    own = [min(each for each in matrix if each >= megabatch) for megabatch in range(arrival)]  # what it is gathered for
    rises = [matrix[arrival][number] - matrix[stage][number] for number, stage in enumerate(own) if stage < arrival]
    return float(np.mean(rises)) if rises else None


def matrix_table(groups: Sequence[Experiment]) -> Table:
    """Lay out the losses on slices of each mega-batch, two rows for each arrival of each experiment on text."""
    found = [(each, matrices) for each in groups if (matrices := matrices_of(each))]
    naming = naming_of([each for each, _ in found])
    rows = []
    for each, matrices in found:
        for name, shown in SHOWN.items():
            for arrival, losses in mean_matrix(matrices, name).items():
                row = {**naming(each), "slice": shown, "after": f"t{arrival}"}
                row |= {f"m{number}": Cell(f"{loss:.4f}", float(loss)) for number, loss in enumerate(losses)}
                gap = {seed: memorised(matrix, arrival) for seed, matrix in matrices.items() if name == TRAINED_ON}
                rise = {seed: forgotten(matrix[name], arrival) for seed, matrix in matrices.items()}
                rows.append(
                    row | {"memorised": interval_cell(Spread.of(gap)), "forgotten": interval_cell(Spread.of(rise))}
                )
    cells = DataFrame(rows)
    if len(cells):  # streams of different lengths
        last = ["memorised", "forgotten"]
        cells = cells[[title for title in cells if title not in last] + last]
        cells = cells.astype(object).where(cells.notna(), NOTHING) if cells.isna().any(axis=None) else cells
    return Table("matrix", *said("matrix"), cells)


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
