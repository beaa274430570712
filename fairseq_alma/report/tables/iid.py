"""What learning sequentially costs against learning from the same data at once, as in the paper's Table 1."""

import json
from dataclasses import dataclass, field
from typing import Sequence

from fairseq_alma.metrics.table import Cell
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import NOTHING, Table, TableCell, number_cell
from fairseq_alma.report.tables.names import NameColumns

NOTES = (
    "Test {name}{unit} of the same learner after k mega-batches, with as many updates in all: i.i.d. on the k "
    "mega-batches at once, and sequentially on one after the other. Mean ± standard deviation over seeds."
)


@dataclass
class Control:
    """A sequential learner and its i.i.d. controls.

    Attributes:
        sequential: the experiment that waits for nothing.
        iid: k -> the experiment on the first k mega-batches at once.
    """

    sequential: Experiment
    iid: dict[int, Experiment] = field(default_factory=dict)

    def pair(self, k: int) -> tuple[Spread, Spread] | None:
        """Return the test values after k mega-batches, i.i.d. and sequential, or None where one was not run yet."""
        control, sequential = self.iid[k].at(k - 1), self.sequential.at(k - 1)
        return None if control is None or sequential is None else (control, sequential)


def controls(groups: Sequence[Experiment]) -> list[Control]:
    """Find the experiments that have an i.i.d. control."""
    found = {_shared(each): Control(each) for each in groups if _is_sequential(each)}
    for experiment in groups:
        k, key = experiment.first.iid, _shared(experiment)
        if k is not None and key in found:
            found[key].iid[k] = experiment
    return [control for control in found.values() if control.iid]


def iid_table(groups: Sequence[Experiment]) -> Table:
    """Lay out a row for each sequential learner that has an i.i.d. control.

    Args:
        groups: of one kind of data.
    """
    measure, found = MEASURES[groups[0].first.kind], controls(groups)
    names = NameColumns([control.sequential for control in found])
    sizes = sorted({k for control in found for k in control.iid})
    titles = [f"k={k} {how}" for k in sizes for how in ("iid", "seq.")]
    rows: list[list[TableCell]] = []
    plain: list[list[Cell]] = []
    for control in found:
        cells: list[TableCell] = []
        numbers: list[Cell] = []
        for k in sizes:
            pair = control.pair(k) if k in control.iid else None
            for spread in pair or (None, None):
                cells.append(NOTHING if spread is None else number_cell(measure.show_spread(spread), spread.mean))
                numbers += [None, None] if spread is None else [spread.mean, spread.deviation]
        rows.append([*names.cells(control.sequential), *cells])
        plain.append([*names.plain(control.sequential), *numbers])
    plain_header = [*names.header, *(f"{title}{figure}" for title in titles for figure in ("", " deviation"))]
    unit = "" if measure.scale == 1 else ", in percent,"
    return Table(
        "iid",
        "Learning sequentially against i.i.d.",
        [*names.header, *titles],
        rows,
        NOTES.format(name=measure.name, unit=unit),
        len(names.header),
        plain_header,
        plain,
    )


def _is_sequential(experiment: Experiment) -> bool:
    run = experiment.first
    return run.iid is None and run.wait == 1 and not run.replay


def _shared(experiment: Experiment) -> str:
    """Spell what a learner and its control have in common."""
    learner, options, train_options, stream = json.loads(experiment.first.settings)
    own = {name: value for name, value in options.items() if name not in ("iid", "wait", "drop_rest")}
    return json.dumps([learner, own, train_options, stream], sort_keys=True)
