"""The tables of ``alma-report``: perplexity per mega-batch, means over seeds, what growth does."""

import statistics
from dataclasses import dataclass
from typing import Optional, Sequence

from fairseq_alma.metrics import anytime
from fairseq_alma.metrics.table import Cell, show_count, show_number, show_power
from fairseq_alma.report.run_figures import RunFigures

PERPLEXITY_NOTES = """\
t0, t1, ...: test perplexity after the arrival of that mega-batch; *: the learner is waiting; –: not run yet.
avg PPL: mean over all arrivals; while waiting, the model of the last update counts, before the first update an
untrained one, whose perplexity is the number of units. final PPL and bits per byte: after the last update.
experts: in each Switch layer, @ models. params: of all that predicts. train FLOPs: of all updates together.
"""
SEED_NOTES = """\
Mean of the test perplexity ± standard deviation (n - 1) over complete runs that differ by their seeds alone.
"""
GROWTH_NOTES = """\
Perplexity on the validation set before growth, right after it, and after the training that follows.
"""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        header: names of the columns.
        shown: the rows as people read them.
        plain_header: names of the columns of ``plain``.
        plain: the rows with plain numbers.
        notes: what the columns mean.
    """

    name: str
    header: list[str]
    shown: list[list[str]]
    plain_header: list[str]
    plain: list[list[Cell]]
    notes: str


def all_tables(runs: Sequence[RunFigures]) -> list[Table]:
    """Return the table of perplexity, and the other two where there is something to put into them."""
    return [table for table in (perplexity_table(runs), seed_table(runs), growth_table(runs)) if table.shown]


def perplexity_table(runs: Sequence[RunFigures]) -> Table:
    """Lay out the perplexity of each run after each mega-batch, a row for each run."""
    num_arrivals = max(run.num_arrivals for run in runs)
    arrivals = [f"t{t}" for t in range(num_arrivals)]
    header = ["learner", "run", "experts", "params", *arrivals, "avg PPL", "final PPL", "bits per byte", "train FLOPs"]
    shown: list[list[str]] = []
    plain: list[list[Cell]] = []
    for run in runs:
        nan = float("nan")
        cells = anytime.table_cells(run.value, run.planned, run.num_arrivals) + [nan] * (
            num_arrivals - run.num_arrivals
        )
        average = nan if run.anytime is None else run.anytime
        flops = anytime.cumulative_computation(run.train_flops)
        params, ppl = anytime.final(run.num_params), anytime.final(run.value)
        ends: list[Optional[float]] = [average, ppl if ppl is not None else nan, run.bits_per_byte]
        numbers = [show_number(value, 2) for value in cells]
        numbers += [show_number(value, digits) for value, digits in zip(ends, (2, 2, 3), strict=True)]
        head = [run.label, str(run.path)]
        shown.append([*head, run.experts, show_count(params), *numbers, show_power(flops)])
        plain.append([*head, run.experts, params, *cells, *ends, flops])
    return Table("perplexity", header, shown, header, plain, PERPLEXITY_NOTES)


def seed_table(runs: Sequence[RunFigures]) -> Table:
    """Lay out mean and deviation over runs that differ by their seeds alone, a row for each such group."""
    groups: dict[str, list[RunFigures]] = {}
    for run in runs:
        if run.is_complete:
            groups.setdefault(run.settings, []).append(run)
    num_arrivals = max(run.num_arrivals for run in runs)
    header = ["learner", "experts", "params", "seeds"]
    shown: list[list[str]] = []
    plain: list[list[Cell]] = []
    for group in groups.values():
        first = group[0]
        if len({run.seed for run in group}) < 2:
            continue
        cells: list[str] = []
        figures: list[Cell] = []
        for arrival in range(num_arrivals):
            ppl = [run.value[arrival] for run in group if arrival in run.value]
            deviation = statistics.stdev(ppl) if len(ppl) > 1 else float("nan")
            cells.append(f"{statistics.mean(ppl):,.2f} ± {show_number(deviation, 2)}" if ppl else "*")
            figures += [statistics.mean(ppl), deviation] if ppl else [None, None]
        params, experts = anytime.final(first.num_params), first.experts
        shown.append([first.label, experts, show_count(params), str(len(group)), *cells])
        plain.append([first.label, experts, params, len(group), *figures])
    arrivals = [f"t{t}" for t in range(num_arrivals)]
    figures_of = [f"{arrival} {figure}" for arrival in arrivals for figure in ("mean", "deviation")]
    return Table("seeds", [*header, *arrivals], shown, [*header, *figures_of], plain, SEED_NOTES)


def growth_table(runs: Sequence[RunFigures]) -> Table:
    """Lay out what each growth step did, a row for each."""
    header = ["learner", "run", "at", "experts", "before", "after growth", "after training"]
    shown: list[list[str]] = []
    plain: list[list[Cell]] = []
    for run in runs:
        updates = sorted(run.value)
        for arrival, grown in sorted(run.grown.items()):
            earlier = [each for each in updates if each < arrival]
            if not earlier or arrival not in run.before_growth:
                continue
            experts = f"{run.num_experts[earlier[-1]]} to {run.num_experts[arrival]}"
            figures = [run.before_growth[arrival], grown, run.valid[arrival]]
            head = [run.label, str(run.path), f"t{arrival}", experts]
            shown.append([*head, *(show_number(figure, 2) for figure in figures)])
            plain.append([*head, *figures])
    return Table("growth", header, shown, header, plain, GROWTH_NOTES)
