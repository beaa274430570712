"""Figures with a row of panels for each experiment: which experts were used, and what is known of each mega-batch."""

from itertools import pairwise
from typing import Any, Mapping, Sequence

import msgspec
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.experiment import Experiment, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.matrix import HELD_OUT, TRAINING, Matrix, matrices_of, mean_matrix
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.sentences import said

MOST_RUNS = 4
MOST_LAYERS = 6
MOST_STEPS = 100  # updates that a panel has room for
LEAST_LABELLED = 0.06  # of all
MOST_NUMBERS = 8  # mega-batches: beyond, numbers would not fit into the fields


def _rows(
    shown: Sequence[Experiment], columns: int, size: tuple[float, float], **sharing: bool
) -> tuple[Figure, list[numpy.ndarray], list[str]]:
    """Return a figure that is so wide and each of whose rows is so high (inches), their axes, and the names."""
    figure, names = style.new_figure(size[0], size[1] * len(shown) + 0.5), names_of(shown)
    lines = []
    for part, name in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], names, strict=True):
        lines.append(part.subplots(1, columns, squeeze=False, sharey=True, **sharing)[0])
        if len(shown) > 1:
            part.suptitle(name, fontsize=8.5, weight="bold")
    return figure, lines, names


def draw_usage(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the shares of the test set that each expert predicts, for four experiments at most.

    Those come first that grow, then those that update most often.

    Raises:
        AlmaError: what a run says of its experts is damaged; names the run.
    """
    usages = {group: usage for group in groups if (usage := _usage(group))}
    ordered = sorted(
        usages, key=lambda group: (group.first.min_experts == group.first.max_experts, -group.course.done.sum())
    )
    shown = ordered[:MOST_RUNS]
    if not shown:
        return []
    columns = min(max(len(layers) for group in shown for layers in usages[group].values()), MOST_LAYERS)
    figure, lines, names = _rows(shown, columns, (max(0.8 + 1.7 * columns, 3.4), 1.7), sharex=True)
    for line, group in zip(lines, shown, strict=True):
        for layer, axes in enumerate(line):
            found = {t: layers[layer] for t, layers in usages[group].items() if layer < len(layers) and layers[layer]}
            if found:
                _draw_layer(axes, found, group.first.num_known)
                axes.set_title(f"layer {layer}")
            else:
                axes.set_axis_off()
        line[0].set_ylabel("share of test set (%)")
    for axes in lines[-1]:
        axes.set_xlabel("arrival (mega-batch)")
    texts = said("expert-usage", names=names, more=len(ordered) - len(shown))
    return [Drawing("expert-usage", *texts, figure)]


def _usage(group: Experiment) -> Mapping[int, list[list[float]]]:
    """Return the shares of each layer's experts by arrival, where some layer has more than one expert."""
    run, rows = group.first, group.arrivals.set_index("arrival")
    told = rows[(rows.run == run.Index) & rows.expert_usage.notna() & (rows.index < run.num_known)]
    usage: dict[int, Any] = told.expert_usage.to_dict()
    for arrival, layers in usage.items():
        try:
            usage[arrival] = msgspec.convert(layers, list[list[float]])
        except msgspec.ValidationError as error:
            raise AlmaError(
                f"{run.path}: expert_usage after arrival t{arrival} is damaged: {str(layers)[:60]} is no list of "
                "shares for each layer; remove it from that stage.json, and the usage of experts is drawn again"
            ) from error
    return usage if any(len(shares) > 1 for layers in usage.values() for shares in layers) else {}


def _draw_layer(axes: Axes, shares: Mapping[int, Sequence[float]], num_arrivals: int) -> None:
    """Draw areas of shares above each other; each holds until the next update. Experts are numbered at the end."""
    arrivals = sorted(shares)
    arrivals = [*arrivals[: -1 : 1 + len(arrivals) // MOST_STEPS], arrivals[-1]]
    places = numpy.array([*arrivals, num_arrivals])
    table = numpy.zeros((len(places), max(len(each) for each in shares.values())))
    for row, arrival in enumerate([*arrivals, arrivals[-1]]):
        table[row, : len(shares[arrival])] = shares[arrival]
    tops = 100 * table.cumsum(axis=1)
    for expert, (below, top) in enumerate(pairwise(numpy.pad(tops, ((0, 0), (1, 0))).T)):
        axes.fill_between(places, below, top, step="post", color=style.expert_colour(expert), linewidth=0)
        axes.step(places, top, where="post", color="white", linewidth=0.5 if len(arrivals) <= 30 else 0.25)
        if table[-1, expert] >= LEAST_LABELLED:
            axes.annotate(
                str(expert), (num_arrivals, (below[-1] + top[-1]) / 2), xytext=(2, 0), textcoords="offset points",
                fontsize=6.5, va="center", annotation_clip=False,
            )  # fmt: skip
    axes.set(xlim=(arrivals[0], num_arrivals), ylim=(0, 100), yticks=range(0, 101, 25))
    axes.grid(False)
    style.arrival_axis(axes.xaxis, arrivals, num_arrivals, 4)


def draw_matrix(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw heat maps of the losses on slices of each mega-batch after each arrival, four experiments at most."""
    found = {each: matrices for each in groups if (matrices := matrices_of(each))}
    shown = list(found)[:MOST_RUNS]
    if not shown:
        return []
    figure, lines, names = _rows(shown, 3, (7.2, 2.1))
    for line, each in zip(lines, shown, strict=True):
        held_out, training = (mean_matrix(found[each], slices) for slices in (HELD_OUT, TRAINING))
        gap = {arrival: held_out[arrival] - training[arrival] for arrival in held_out}
        losses = [*held_out.values(), *training.values()]
        limits = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
        _draw_map(line[0], held_out, "held out", limits, "viridis_r")
        _draw_map(line[1], training, "trained on", limits, "viridis_r")
        most = max(abs(losses).max() for losses in gap.values()) or 1.0
        _draw_map(line[2], gap, "difference: memorised", (-most, most), "RdBu_r")
        line[0].set_ylabel("after arrival")
    return [Drawing("matrix", *said("matrix-map", names=names, more=len(found) - len(shown)), figure)]


def _draw_map(axes: Axes, matrix: Matrix, title: str, limits: tuple[float, float], colours: str) -> None:
    arrivals = sorted(matrix)
    table = numpy.array([matrix[arrival] for arrival in arrivals])
    image = axes.imshow(table, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set(title=title, xlabel="mega-batch")
    axes.set_yticks(range(len(arrivals)), [f"t{arrival}" for arrival in arrivals])
    axes.grid(False)
    for row, arrival in enumerate(arrivals):  # steps: what is left of them has arrived
        axes.plot([arrival + 0.5] * 2, [row - 0.5, row + 0.5], color="white", linewidth=1.2)
    if table.shape[1] <= MOST_NUMBERS:
        for (row, column), loss in numpy.ndenumerate(table):
            red, green, blue, _ = image.cmap(image.norm(loss))
            ink = style.ink_on((red, green, blue))
            axes.text(column, row, f"{loss:.2f}", ha="center", va="center", fontsize=6, color=ink)
    axes.set_xlim(-0.5, table.shape[1] - 0.5)
    axes.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // MOST_NUMBERS)))
