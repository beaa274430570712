"""Which experts were used, after each update: shares of the test set, one panel for each expert layer."""

from itertools import pairwise
from typing import Any, Mapping, Sequence

import msgspec
import numpy
from matplotlib.axes import Axes

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.experiment import Experiment, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import RunTable

MOST_RUNS = 4
MOST_LAYERS = 6
MOST_STEPS = 100  # updates that a panel has room for
LEAST_LABELLED = 0.06  # of all


def draw(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw a row of panels for each experiment that says which experts it used, four rows at most.

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
    figure = style.new_figure(max(0.8 + 1.7 * columns, 3.4), 0.5 + 1.7 * len(shown))
    names = names_of(shown)
    parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for part, group, name in zip(parts, shown, names, strict=True):
        grid = part.subplots(1, columns, squeeze=False, sharex=True, sharey=True)[0]
        for layer, axes in enumerate(grid):
            found = {t: layers[layer] for t, layers in usages[group].items() if layer < len(layers) and layers[layer]}
            if found:
                _draw_layer(axes, found, group.first.num_known)
                axes.set_title(f"layer {layer}")
            else:
                axes.set_axis_off()
        grid[0].set_ylabel("share of test set (%)")
        if len(shown) > 1:
            part.suptitle(name, fontsize=8.5, weight="bold")
    for axes in parts[-1].axes:
        axes.set_xlabel("arrival (mega-batch)")
    caption = (
        "Share of the test set that each expert of a layer predicts, after each update (of very many, some), for "
        f"{'; '.join(names)}. Numbers beside the areas are experts. Even areas: balanced use; a thin one: an expert "
        "that hardly any input reaches."
    )
    if len(ordered) > len(shown):
        caption += f" {len(ordered) - len(shown)} more experiments with experts not shown."
    return [Drawing("expert-usage", "Usage of experts", caption, figure)]


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
    axes.set_xlim(arrivals[0], num_arrivals)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(False)
    style.arrival_axis(axes.xaxis, arrivals, num_arrivals, 4)
