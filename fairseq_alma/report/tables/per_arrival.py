"""Test perplexity or error of each run after each mega-batch, as in the paper's Table 2."""

import math
from typing import Optional, Sequence

from fairseq_alma.metrics import anytime
from fairseq_alma.metrics.table import Cell, show_count, show_number, show_power
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.table import Table, TableCell, mark_best, name_cell, number_cell
from fairseq_alma.report.tables.names import NameColumns, by_settings

MAX_COLUMNS = 20
FEW_COLUMNS = 10
WHILE_WAITING = "while waiting, the model of the last update counts, before the first update an untrained one, "
TEXT_NOTES = (
    "t0, t1, ...: test perplexity after the arrival of that mega-batch; *: the learner is waiting; –: not run yet. "
    f"avg PPL: mean over all arrivals; {WHILE_WAITING}whose perplexity is the number of units. final PPL and bits per "
    "byte: after the last update. experts: in each Switch layer, @ models. "
)
IMAGE_NOTES = (
    "t0, t1, ...: test error in percent after the arrival of that mega-batch; *: the learner is waiting; –: not run "
    f"yet. CER: sum of the test error over all arrivals, in percent points; {WHILE_WAITING}which is right once in as "
    "many cases as there are classes. final error: after the last update. experts: in each mixture layer; models: that "
    "predict together. "
)
NOTES = (
    "params (|θ|): of all that predicts, from the first update to the last. train FLOPs: of all updates together. "
    "Bold: the lowest of a column."
)


def arrival_table(runs: Sequence[RunFigures], groups: Sequence[Experiment]) -> Table:
    """Lay out the test value of each run after each mega-batch, a row for each run.

    Args:
        runs: all of one kind of data.
        groups: the experiments that they belong to.
    """
    measure, is_text = MEASURES[runs[0].kind], runs[0].is_text
    names, experiment_of_settings = NameColumns(groups), by_settings(groups)
    num_arrivals = max(run.num_arrivals for run in runs)
    chosen = shown_arrivals(num_arrivals)
    ends = [measure.anytime, measure.final, *(["bits per byte"] if is_text else [])]
    seeds = ["seed"] if len({run.seed for run in runs}) > 1 else []
    header = [*names.header, *seeds, "params", *(f"t{t}" for t in chosen), *ends, "train FLOPs", "run"]
    plain_header = [
        *names.header,
        *seeds,
        "params",
        *(f"t{t}" for t in range(num_arrivals)),
        *ends,
        "train FLOPs",
        "run",
    ]
    ranks = {experiment.first.settings: rank for rank, experiment in enumerate(groups)}
    runs = sorted(runs, key=lambda run: (ranks[run.settings], run.seed))
    rows: list[list[TableCell]] = []
    plain: list[list[Cell]] = []
    for run in runs:
        head = [*names.cells(experiment_of_settings[run.settings])[:-1], name_cell(run.experts)]
        head += [number_cell(str(run.seed), run.seed)] if seeds else []
        values, last = _cells(run, num_arrivals), _ends(run)
        cells = [number_cell(measure.show(values[t]), values[t]) for t in chosen]
        shown_ends = [show_number(last[0], measure.anytime_digits), measure.show(last[1]), show_number(last[2], 3)]
        cells += [number_cell(text, value) for text, value in zip(shown_ends, last, strict=True)][: len(ends)]
        params, path = anytime.final(run.num_params), str(run.path)
        flops = number_cell(show_power(run.computation), run.computation)
        rows.append([*head, number_cell(show_params(run), params), *cells, flops, name_cell(path)])
        plain.append([*(cell.text for cell in head), params, *values, *last[: len(ends)], run.computation, path])
    first = len(names.header) + len(seeds) + 1
    rows = mark_best(rows, range(first, first + len(chosen) + len(ends)), [run.iid is None for run in runs])
    notes = (TEXT_NOTES if is_text else IMAGE_NOTES) + NOTES
    return Table(
        measure.name,
        f"Test {measure.name} after each mega-batch",
        header,
        rows,
        notes,
        len(names.header),
        plain_header,
        plain,
    )


def shown_arrivals(num_arrivals: int) -> list[int]:
    """Return the arrivals that people are shown: all of a few, the last of each tenth of many."""
    if num_arrivals <= MAX_COLUMNS:
        return list(range(num_arrivals))
    return [round(num_arrivals * part / FEW_COLUMNS) - 1 for part in range(1, FEW_COLUMNS + 1)]


def show_params(run: RunFigures) -> str:
    """Spell the number of parameters; of a learner that grows, the first and the last."""
    if not run.num_params:
        return show_count(None)
    first, last = show_count(run.num_params[min(run.num_params)]), show_count(run.num_params[max(run.num_params)])
    return last if first == last else f"{first} to {last}"


def _cells(run: RunFigures, num_arrivals: int) -> list[Optional[float]]:
    cells = anytime.table_cells(run.value, run.planned, run.num_arrivals)
    return [*cells, *([math.nan] * (num_arrivals - run.num_arrivals))]


def _ends(run: RunFigures) -> list[float]:
    average = math.nan if run.anytime is None else run.anytime
    return [average, math.nan if run.final is None else run.final, run.bits_per_byte]
