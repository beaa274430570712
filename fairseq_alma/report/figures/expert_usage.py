"""Which experts were used, after each update: shares of the test set, one panel for each expert layer."""

from itertools import accumulate
from typing import Any, Mapping, Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.run_groups import RunGroup, groups_of, names_of
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.run_figures import RunFigures

NAME = "expert-usage"
TITLE = "Usage of experts"
EXTRA = "expert_usage"
MOST_RUNS = 4
MOST_LAYERS = 6
MOST_STEPS = 100  # updates that a panel has room for
LEAST_LABELLED = 0.06  # of all
FEW_ARRIVALS = 12


def draw(runs: Sequence[RunFigures]) -> list[Drawing]:
    """Draw a row of panels for each experiment that says which experts it used, four rows at most.

    Raises:
        AlmaError: what a run says of its experts is damaged; names the run.
    """
    groups = [group for group in groups_of(runs) if _usage(group.first)]
    shown = sorted(groups, key=_interest)[:MOST_RUNS]
    if not shown:
        return []
    usages = [_usage(group.first) for group in shown]
    columns = min(max(len(layers) for usage in usages for layers in usage.values()), MOST_LAYERS)
    figure = style.new_figure(max(0.8 + 1.7 * columns, 3.4), 0.5 + 1.7 * len(shown))
    names = names_of(shown)
    parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for part, group, usage, name in zip(parts, shown, usages, names, strict=True):
        _draw_run(part, usage, columns, len(group.first.curve))
        if len(shown) > 1:
            part.suptitle(name, fontsize=8.5, weight="bold")
    for axes in parts[-1].axes:
        axes.set_xlabel("arrival (mega-batch)")
    return [Drawing(NAME, TITLE, _caption(names, len(groups) - len(shown)), figure)]


def _usage(run: RunFigures) -> Mapping[int, list[list[float]]]:
    """Return the shares of each layer's experts by arrival, where some layer has more than one expert."""
    usage = {arrival: layers for arrival, layers in run.extras.get(EXTRA, {}).items() if arrival < len(run.curve)}
    for arrival, layers in usage.items():
        if not _are_shares(layers):
            raise AlmaError(
                f"{run.path}: {EXTRA} after arrival t{arrival} is damaged: {str(layers)[:60]} is no list of shares for "
                "each layer; remove it from that stage.json, and the usage of experts is drawn again"
            )
    return usage if any(len(shares) > 1 for layers in usage.values() for shares in layers) else {}


def _are_shares(layers: Any) -> bool:
    return isinstance(layers, list) and all(
        isinstance(shares, list) and all(isinstance(share, (int, float)) for share in shares) for shares in layers
    )


def _interest(group: RunGroup) -> tuple[bool, int]:
    """Order runs: those that grow first, then those that update most often."""
    sizes = set(group.first.num_experts.values())
    return len(sizes) < 2, -len(group.updates)


def _draw_run(figure: FigureBase, usage: Mapping[int, Any], columns: int, num_arrivals: int) -> None:
    """Draw the layers of a run beside each other."""
    grid = figure.subplots(1, columns, squeeze=False, sharex=True, sharey=True)[0]
    for layer, axes in enumerate(grid):
        shares = {arrival: layers[layer] for arrival, layers in usage.items() if layer < len(layers) and layers[layer]}
        if shares:
            _draw_layer(axes, shares, num_arrivals)
            axes.set_title(f"layer {layer}")
        else:
            style.hide(axes)
    grid[0].set_ylabel("share of test set (%)")


def _draw_layer(axes: Axes, shares: Mapping[int, Sequence[float]], num_arrivals: int) -> None:
    """Draw areas of shares above each other; each holds until the next update."""
    arrivals = sorted(shares)
    arrivals = [*arrivals[: -1 : 1 + len(arrivals) // MOST_STEPS], arrivals[-1]]
    num_experts = max(len(each) for each in shares.values())
    places = numpy.array([*arrivals, num_arrivals])
    table = numpy.zeros((len(places), num_experts))
    for row, arrival in enumerate(arrivals):
        table[row, : len(shares[arrival])] = shares[arrival]
    table[-1] = table[-2]
    tops = 100 * table.cumsum(axis=1)
    for expert in range(num_experts):
        below = tops[:, expert - 1] if expert else numpy.zeros(len(places))
        axes.fill_between(places, below, tops[:, expert], step="post", color=style.expert_colour(expert), linewidth=0)
        axes.step(places, tops[:, expert], where="post", color="white", linewidth=0.5 if len(arrivals) <= 30 else 0.25)
    _number_experts(axes, table[-1], num_arrivals)
    axes.set_xlim(arrivals[0], num_arrivals)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(False)
    if num_arrivals <= FEW_ARRIVALS:
        axes.set_xticks(arrivals, [f"$t_{{{arrival}}}$" for arrival in arrivals])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _number_experts(axes: Axes, shares: Sequence[float], end: int) -> None:
    """Write each expert's number beside the end of its area, where there is room."""
    for expert, (share, top) in enumerate(zip(shares, accumulate(shares), strict=True)):
        if share >= LEAST_LABELLED:
            place = (end, 100 * (top - share / 2))
            axes.annotate(
                str(expert), place, xytext=(2, 0), textcoords="offset points", fontsize=6.5, va="center",
                annotation_clip=False,
            )  # fmt: skip


def _caption(names: Sequence[str], num_left_out: int) -> str:
    words = [
        "Share of the test set that each expert of a layer predicts, after each update (of very many, some), for "
        f"{'; '.join(names)}. Numbers beside the areas are experts. Even areas: balanced use; a thin one: an expert "
        "that hardly any input reaches."
    ]
    if num_left_out:
        words.append(f"{num_left_out} more experiments with experts not shown.")
    return " ".join(words)
