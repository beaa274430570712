"""What each growth step did to the value on the validation set, and what the training that followed did."""

import statistics
from typing import Sequence

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES, Measure
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.table import Table, TableCell, name_cell, number_cell
from fairseq_alma.report.tables.names import by_settings

MAX_ROWS = 30
FIGURES = ["before", "after growth", "after training"]
NOTES = "{name}{unit} on the validation set before growth, right after it, and after the training that follows{many}."


def growth_table(runs: Sequence[RunFigures], groups: Sequence[Experiment]) -> Table:
    """Lay out a row for each growth step; where there are many, one for each run with the means over its steps.

    Args:
        runs: all of one kind of data.
        groups: the experiments that they belong to.
    """
    measure, experiment_of_settings = MEASURES[runs[0].kind], by_settings(groups)
    steps: list[list[TableCell]] = []
    means: list[list[TableCell]] = []
    ranks = {experiment.first.settings: rank for rank, experiment in enumerate(groups)}
    for run in sorted(runs, key=lambda run: (ranks[run.settings], run.seed)):
        experiment = experiment_of_settings[run.settings]
        label = f"{experiment.label}, {experiment.size}".removesuffix(", ")
        found = _steps(run)
        head, path = [name_cell(label)], [name_cell(str(run.path))]
        for at, experts, figures in found:
            steps.append([*head, name_cell(at), name_cell(experts), *_cells(measure, figures), *path])
        if found:
            columns = zip(*(figures for _, _, figures in found), strict=True)
            many = [f"{len(found)} steps", run.experts]
            cells = _cells(measure, [statistics.fmean(each) for each in columns])
            means.append([*head, *map(name_cell, many), *cells, *path])
    shown = steps if len(steps) <= MAX_ROWS else means
    notes = NOTES.format(
        name=measure.name.capitalize(),
        unit="" if measure.scale == 1 else " in percent",
        many="" if shown is steps else "; means over the steps of a run, each step is in the CSV file",
    )
    header = ["learner", "at", "experts", *FIGURES, "run"]
    plain = [[cell.value for cell in row] for row in steps]
    return Table("growth", "What growth does", header, shown, notes, 3, header, plain)


def _steps(run: RunFigures) -> list[tuple[str, str, list[float]]]:
    """Return arrival, experts and the three figures of each growth step."""
    updates = sorted(run.value)
    found = []
    for arrival, grown in sorted(run.grown.items()):
        earlier = [each for each in updates if each < arrival]
        if not earlier or arrival not in run.before_growth:
            continue
        experts = f"{run.num_experts[earlier[-1]]} to {run.num_experts[arrival]}"
        found.append((f"t{arrival}", experts, [run.before_growth[arrival], grown, run.valid[arrival]]))
    return found


def _cells(measure: Measure, figures: Sequence[float]) -> list[TableCell]:
    return [number_cell(measure.show(figure), figure) for figure in figures]
