"""Learners in a plane of cost and result: lines, markers, a broken axis and the legend.

Colour stands for the learner, the marker for its waiting time, hollow for replay. A learner that waits counts as
untrained until its first update, so its average perplexity may be a hundred times that of the others. Where one axis
has no room for both, it is broken: a flat strip on top holds what is far above.
Source: Figures 2, 4, 5, 7 and 8 of the paper.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.figures import style
from fairseq_alma.report.read_run import TERA

LONGEST_LABEL = 16
_FAR_APART = 4.0  # from this factor on, results need a logarithmic axis
_PARTS = (1.0, 3.2)  # heights of the parts of a broken axis
_LABEL_GAP = 0.052  # of the height of the axes
_LABEL_REACH = (0.05, 0.02)  # of their width, and that for each letter: labels that are nearer overlap


@dataclass(frozen=True, eq=False)
class Trace:
    """A line: an experiment's way through the stream, one learner in several sizes, or without and with replay.

    Attributes:
        groups: that of each full marker; the last one's looks are the line's.
        costs: in each column of panels, at each point.
        results: at each point.
        label: what tells the trace from others of its learner and wait.
    """

    groups: Sequence[Experiment]
    costs: Sequence[Sequence[float]]
    results: Sequence[float]
    label: str = ""

    @classmethod
    def way(cls, group: Experiment, costs: Sequence[str], label: str = "") -> "Trace":
        """Return an experiment's way through the stream: averages so far over these columns of its course."""
        course = group.course[group.course.done.cummax()]
        return cls([group], [course[cost].to_numpy() for cost in costs], course.average.to_numpy(), label)

    @classmethod
    def through(cls, groups: Sequence[Experiment]) -> "Trace":
        """Return a line that joins what experiments come to over the whole stream, by compute and by memory."""
        tflops = [group.complete.computation.mean() / TERA for group in groups]
        memory = [group.complete.memory.mean() for group in groups]
        return cls(groups, [tflops, memory], [_anytime(group)[0] for group in groups])


def _anytime(group: Experiment) -> tuple[float, float]:
    """Return mean and deviation over the seeds of average perplexity or CER; a deviation of 0 where there is none."""
    found = group.spread("anytime")
    if found is None:
        return math.nan, 0.0
    return found.mean, 0.0 if math.isnan(found.deviation) else found.deviation


def grid(figure: Any, groups: Sequence[Experiment], traces: Sequence[Trace], columns: int) -> ndarray:
    """Lay out panels beside each other, for bars of deviation and traces, that share a vertical axis of results.

    Returns:
        The axes, (1, columns), or where the vertical axis is broken (2, columns).
    """
    ends = [mean + sign * deviation for mean, deviation in map(_anytime, groups) for sign in (-1, 1)]
    results = [*ends, *(result for trace in traces for result in trace.results)]
    gap = style.gap_in(results)
    rows = 1 if gap is None else 2
    grid = figure.subplots(
        rows, columns, squeeze=False, sharex="col", sharey="row", gridspec_kw={"height_ratios": _PARTS[-rows:]}
    )
    near = [value for value in results if gap is None or value < gap]
    if max(near, default=1) > _FAR_APART * min(near, default=1) > 0:
        style.logarithmic(grid[-1, 0].yaxis, near, least_span=style.NARROW)
    else:
        style.linear(grid[-1, 0].yaxis, near)
    if gap is not None:
        style.logarithmic(grid[0, 0].yaxis, [value for value in results if value > gap])
        for upper, lower in grid.T:
            _break_between(upper, lower)
    is_text = groups[0].first.is_text
    grid[-1, 0].set_ylabel("average test perplexity" if is_text else "cumulative error rate (% points)")
    return grid


def _break_between(upper: Axes, lower: Axes) -> None:
    """Show that two axes above each other are one with a part left out."""
    upper.spines["bottom"].set_visible(False)
    upper.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    for axes, end in ((upper, 0), (lower, 1)):
        axes.plot(
            [0], [end], transform=axes.transAxes, marker=[(-1, -0.6), (1, 0.6)], markersize=6, linestyle="none",
            color="black", clip_on=False,
        )  # fmt: skip


def write_labels(parts: ndarray, traces: Sequence[Trace], column: int) -> None:
    """Write labels beside last points, moved apart where they are close; the horizontal axis has its limits."""
    for axes in parts:
        gap = _LABEL_GAP if axes is parts[-1] else _LABEL_GAP * _PARTS[1] / _PARTS[0]
        to_axes = axes.transScale + axes.transLimits
        placed = [
            (*to_axes.transform((each.costs[column][-1], each.results[-1])), each) for each in traces if each.label
        ]
        inside = sorted((each for each in placed if 0 <= each[1] <= 1), key=lambda each: each[0])
        while inside:
            reach = _LABEL_REACH[0] + _LABEL_REACH[1] * len(inside[0][2].label[:LONGEST_LABEL])
            near = [each for each in inside if each[0] - inside[0][0] < reach]
            inside = inside[len(near) :]
            for (x, _, trace), height in zip(near, style.spread([each[1] for each in near], gap), strict=True):
                axes.text(
                    x + 0.025, height, trace.label[:LONGEST_LABEL], fontsize=6.5, va="center", transform=axes.transAxes,
                    color=style.colour_of(trace.groups[-1].first.learner),
                )  # fmt: skip


class Look:
    """How everything of a figure looks that stands for an experiment.

    Args:
        groups: all of the figure.
        sizes: of the backbone, those that have lines of their own.
    """

    def __init__(self, groups: Sequence[Experiment], sizes: Iterable[str] = ()) -> None:
        self.markers = style.wait_markers(group.first.wait for group in groups)
        self.dashes: Mapping[str, Any] = dict(zip(sizes, itertools.cycle(style.DASHES)))

    def draw(self, parts: ndarray, trace: Trace, column: int) -> None:
        """Draw a thin line, small dots for what was before, and full markers with the deviation over seeds."""
        run, xs, ys = trace.groups[-1].first, trace.costs[column], trace.results
        colour, count = style.colour_of(run.learner), len(trace.groups)
        for axes in parts:
            dash = self.dashes.get(run.backbone, "-")
            axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=0.9, alpha=0.75)
            if count < len(xs):
                axes.plot(xs, ys, ".", color=colour, markersize=3.5)
            for x, y, group in zip(xs[-count:], ys[-count:], trace.groups, strict=True):
                hollow, deviation, marker = group.first.replay, _anytime(group)[1], self.markers[group.first.wait]
                axes.errorbar(
                    [x], [y], yerr=[deviation] if deviation else None, color=colour, marker=marker, markersize=6.3,
                    markerfacecolor="white" if hollow else colour, markeredgecolor=colour if hollow else "white",
                    markeredgewidth=1.0 if hollow else 0.4, elinewidth=0.8, capsize=1.5, zorder=3,
                )  # fmt: skip


def write_legend(figure: Figure, looks: Sequence[Look], parts: Iterable[Sequence[Experiment]]) -> None:
    """Write the legend beside a figure: learners, then what else tells the experiments of its parts apart."""
    runs = [group.first for part in parts for group in part]
    found = [(run.name, style.colour_of(run.learner), "o", style.colour_of(run.learner)) for run in runs]
    waits = sorted({run.wait for run in runs})
    markers = {wait: marker for look in looks for wait, marker in look.markers.items()}
    found += [(f"wait {wait}", style.GREY, markers[wait], style.GREY) for wait in waits if len(waits) > 1]
    found += [("with replay", style.GREY, "o", "white")] if any(run.replay for run in runs) else []
    handles = [style.sample(*each, markersize=5.5, markerfacecolor=face) for *each, face in dict.fromkeys(found)]
    # A sample for each kind of dashes; sizes of the runs and of the paper's results below share them.
    dashes: dict[Any, list[str]] = {}
    for index, look in enumerate(looks):
        for size, dash in look.dashes.items() if len(look.dashes) > 1 else ():
            dashes.setdefault(dash, []).append(f"{size} (paper)" if index else size)
    handles += [style.sample("\n".join(sizes), style.GREY, dash=dash, linewidth=0.9) for dash, sizes in dashes.items()]
    figure.legend(handles=handles, loc="outside right upper", alignment="left", handlelength=2.4 if dashes else 1.0)
