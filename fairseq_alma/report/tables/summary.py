"""What each experiment comes to over the whole stream: CER or average perplexity, Mem, Comp, final value."""

from typing import Callable, Optional, Sequence

from fairseq_alma.metrics import anytime
from fairseq_alma.metrics.table import Cell, show_count, show_power
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES, Measure
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import NOTHING, Table, TableCell, mark_best, number_cell
from fairseq_alma.report.tables.names import NameColumns

Figure = Callable[[RunFigures], Optional[float]]
NOTES = (
    "Mean ± standard deviation (n - 1) over seeds, of complete runs. {anytime}: {meaning}. Mem: parameters summed over "
    "all arrivals. Comp: training FLOPs of all updates. test FLOPs: to predict one {per} after the last update. hours: "
    "time that the updates took. Bold: the lowest of a column."
)
MEANINGS = {
    "avg PPL": "mean test perplexity over all arrivals",
    "CER": "sum of the test error over all arrivals, in percent points; final error in percent",
}


def summary_table(groups: Sequence[Experiment]) -> Table:
    """Lay out one row for each experiment.

    Args:
        groups: of one kind of data.
    """
    measure, names = MEASURES[groups[0].first.kind], NameColumns(groups)
    groups = [experiment for experiment in groups if experiment.first.iid is None]  # they learn from no stream
    columns = _columns(measure)
    header = [*names.header, "seeds", *(title for title, _, _ in columns)]
    rows: list[list[TableCell]] = []
    plain: list[list[Cell]] = []
    for experiment in groups:
        spreads = [experiment.spread(figure) for _, figure, _ in columns]
        cells = [
            NOTHING if spread is None else number_cell(show(spread), spread.mean)
            for spread, (_, _, show) in zip(spreads, columns, strict=True)
        ]
        rows.append([*names.cells(experiment), _seeds(experiment), *cells])
        numbers: list[Cell] = []
        for spread in spreads:
            numbers += [None, None] if spread is None else [spread.mean, spread.deviation]
        plain.append([*names.plain(experiment), len(experiment.complete), *numbers])
    first = len(names.header) + 1
    rows = mark_best(rows, range(first, first + len(columns) - 1))
    plain_header = [*names.header, "seeds"]
    for title, _, _ in columns:
        plain_header += [title, f"{title} deviation"]
    notes = NOTES.format(anytime=measure.anytime, meaning=MEANINGS[measure.anytime], per=measure.per)
    return Table("summary", "Over the whole stream", header, rows, notes, len(names.header), plain_header, plain)


def _columns(measure: Measure) -> list[tuple[str, Figure, Callable[[Spread], str]]]:
    """Title, figure of a run and spelling of each column."""
    return [
        (measure.anytime, lambda run: run.anytime, measure.show_anytime),
        (measure.final, lambda run: run.final, measure.show_spread),
        ("Mem", lambda run: run.memory, lambda spread: show_count(spread.mean)),
        ("Comp", lambda run: run.computation, lambda spread: show_power(spread.mean)),
        (f"test FLOPs/{measure.per}", _test_flops, lambda spread: show_count(spread.mean)),
        ("hours", lambda run: sum(run.wall_seconds.values()) / 3600, lambda spread: spread.show(2)),
    ]


def _test_flops(run: RunFigures) -> Optional[float]:
    return anytime.final(run.test_flops)


def _seeds(experiment: Experiment) -> TableCell:
    complete, total = len(experiment.complete), len(experiment.runs)
    return number_cell(f"{total}" if complete == total else f"{complete} of {total}", complete)
