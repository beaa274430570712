"""Heat maps of the loss on slices of each mega-batch after each arrival: held out, trained on, and the difference."""

from typing import Sequence

import numpy as np
from matplotlib.axes import Axes

from fairseq_alma.report.experiment import Experiment, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.matrix import HELD_OUT, TRAINING, Matrix, matrices_of, mean_matrix
from fairseq_alma.report.read_run import RunTable

MOST_RUNS = 4
MOST_NUMBERS = 8  # mega-batches: beyond, numbers would not fit into the fields


def draw(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw a row of three maps for each experiment that has such losses, four rows at most."""
    found = {each: matrices for each in groups if (matrices := matrices_of(each))}
    shown = list(found)[:MOST_RUNS]
    if not shown:
        return []
    figure = style.new_figure(7.2, 0.4 + 2.1 * len(shown))
    names = names_of(shown)
    parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for part, each, name in zip(parts, shown, names, strict=True):
        held_out, training = (mean_matrix(found[each], slices) for slices in (HELD_OUT, TRAINING))
        gap = {arrival: held_out[arrival] - training[arrival] for arrival in held_out}
        grid = part.subplots(1, 3, sharey=True)
        low = min(losses.min() for matrix in (held_out, training) for losses in matrix.values())
        high = max(losses.max() for matrix in (held_out, training) for losses in matrix.values())
        for axes, matrix, title in ((grid[0], held_out, "held out"), (grid[1], training, "trained on")):
            _draw_map(axes, matrix, title, (low, high), "viridis_r")
        most = max(abs(losses).max() for losses in gap.values()) or 1.0
        _draw_map(grid[2], gap, "difference: memorised", (-most, most), "RdBu_r")
        grid[0].set_ylabel("after arrival")
        if len(shown) > 1:
            part.suptitle(name, fontsize=8.5, weight="bold")
    caption = (
        "Test loss in nats per token on a slice of each mega-batch after each arrival, mean over seeds, for "
        f"{'; '.join(names)}. Left: text that is held out; middle: as much of what is trained on, not yet right of the "
        "steps; right: the difference, what is memorised."
    )
    if len(found) > len(shown):
        caption += f" {len(found) - len(shown)} more experiments not shown."
    return [Drawing("matrix", "What is known of each mega-batch", caption, figure)]


def _draw_map(axes: Axes, matrix: Matrix, title: str, limits: tuple[float, float], colours: str) -> None:
    arrivals = sorted(matrix)
    table = np.array([matrix[arrival] for arrival in arrivals])
    image = axes.imshow(table, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set_title(title)
    axes.set_xlabel("mega-batch")
    axes.set_yticks(range(len(arrivals)), [f"t{arrival}" for arrival in arrivals])
    axes.grid(False)
    for row, arrival in enumerate(arrivals):  # steps: what is left of them has arrived
        axes.plot([arrival + 0.5] * 2, [row - 0.5, row + 0.5], color="white", linewidth=1.2)
    if table.shape[1] <= MOST_NUMBERS:
        for (row, column), loss in np.ndenumerate(table):
            red, green, blue, _ = image.cmap(image.norm(loss))
            colour = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "white"
            axes.text(column, row, f"{loss:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xlim(-0.5, table.shape[1] - 0.5)
    axes.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // MOST_NUMBERS)))
