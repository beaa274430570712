"""Mean and deviation of the test value after each mega-batch, over runs that differ by their seeds alone."""

from typing import Sequence

from fairseq_alma.metrics.table import WAITING, Cell
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import Table, TableCell, mark_best, number_cell
from fairseq_alma.report.tables.names import NameColumns
from fairseq_alma.report.tables.per_arrival import show_params, shown_arrivals

NOTES = (
    "Mean of the test {name} ± standard deviation (n - 1) over complete runs that differ by their seeds alone{unit}."
)


def seed_table(groups: Sequence[Experiment]) -> Table:
    """Lay out a row for each experiment with two seeds or more.

    Args:
        groups: of one kind of data.
    """
    measure = MEASURES[groups[0].first.kind]
    several = [experiment for experiment in groups if len(experiment.complete) > 1]
    names = NameColumns(several)
    num_arrivals = max(experiment.first.num_arrivals for experiment in groups)
    chosen = shown_arrivals(num_arrivals)
    rows: list[list[TableCell]] = []
    plain: list[list[Cell]] = []
    for experiment in several:
        runs = experiment.complete
        spreads = [Spread.of({run.seeds: run.value.get(arrival) for run in runs}) for arrival in range(num_arrivals)]
        head = [number_cell(show_params(experiment.first), _params(experiment)), number_cell(str(len(runs)), len(runs))]
        cells = [
            TableCell(WAITING) if (spread := spreads[arrival]) is None
            else number_cell(measure.show_spread(spread), spread.mean)
            for arrival in chosen
        ]  # fmt: skip
        rows.append([*names.cells(experiment), *head, *cells])
        numbers: list[Cell] = []
        for spread in spreads:
            numbers += [None, None] if spread is None else [spread.mean, spread.deviation]
        plain.append([*names.plain(experiment), _params(experiment), len(runs), *numbers])
    header = [*names.header, "params", "seeds"]
    figures = [f"t{arrival} {figure}" for arrival in range(num_arrivals) for figure in ("mean", "deviation")]
    first = len(header)
    return Table(
        "seeds",
        f"Test {measure.name} over seeds",
        [*header, *(f"t{arrival}" for arrival in chosen)],
        mark_best(rows, range(first, first + len(chosen))),
        NOTES.format(name=measure.name, unit="" if measure.scale == 1 else ", in percent"),
        len(names.header),
        [*header, *figures],
        plain,
    )


def _params(experiment: Experiment) -> int:
    params = experiment.first.num_params
    return params[max(params)]
