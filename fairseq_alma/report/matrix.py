"""What a model knows of each mega-batch after each arrival, what of it is memorised, and what is forgotten again.

Of each mega-batch a slice is held out, and as much of what is trained on is tested too (``alma-stream --matrix``).
"""

import math
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from pandas import DataFrame

from fairseq_alma.report.experiment import Experiment, naming_of
from fairseq_alma.report.sentences import said
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import NOTHING, Cell, Table, interval_cell

HELD_OUT, TRAINING = "held_out", "training"
SHOWN = {HELD_OUT: "held-out", TRAINING: "training"}
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
    gap = matrix[HELD_OUT][arrival] - matrix[TRAINING][arrival]
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
                gap = {seed: memorised(matrix, arrival) for seed, matrix in matrices.items() if name == TRAINING}
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
