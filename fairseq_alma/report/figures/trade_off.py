"""Learners in a plane of cost and result: the trade-off, the number of experts, the effect of replay.

Colour stands for the learner, the marker for its waiting time, hollow for replay. A learner that waits counts as
untrained until its first update, so its average perplexity may be a hundred times that of the others. Where one axis
has no room for both, it is broken: a flat strip on top holds what is far above.
Source: Figures 2, 4, 5, 7 and 8 of the paper.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy import concatenate, full, hypot, ndarray, zeros

from fairseq_alma.report import paper as paper_numbers
from fairseq_alma.report.experiment import Experiment, begun, by_size, completed, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import TERA, RunTable
from fairseq_alma.report.spelling import said, show_count

LONGEST_LABEL = 16
MOST_COLUMNS = 3
CROWDED = 12  # pairs with and without replay in one panel
MARKER, HIDDEN = 6.3, 0.02  # size in points; share of the axes within which a marker covers another
_FAR_APART = 4.0  # from this factor on, results need a logarithmic axis
_PARTS = (1.0, 3.2)  # heights of the parts of a broken axis
_LABEL_GAP = 0.052  # of the height of the axes
_LABEL_REACH = (0.05, 0.02)  # of their width, and that for each letter: labels that are nearer overlap
Columns = Mapping[str, Callable[[Axis, Sequence[float]], None]]  # of costs: label, and what scales the axis


@dataclass(frozen=True, eq=False)
class Trace:
    """A line: an experiment's way through the stream, one learner in several sizes, or without and with replay.

    Attributes:
        groups: that of each full marker; the last one's looks are the line's.
        costs: in each column of panels, at each point, as `results` are.
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
    """Lay out panels, for bars of deviation and traces, that share a vertical axis of results.

    Returns their axes, (1, columns), or where the vertical axis is broken (2, columns).
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
                    x + 0.03, height, trace.label[:LONGEST_LABEL], fontsize=6.5, va="center", transform=axes.transAxes,
                    zorder=4, color=style.colour_of(trace.groups[-1].first.learner),
                )  # fmt: skip


def marker_sizes(axes: Axes, traces: Sequence[Trace], column: int) -> list[ndarray]:
    """Return the sizes of each trace's full markers: larger where later ones cover it, so that it shows as a ring."""
    to_axes, covering, sizes = axes.transScale + axes.transLimits, zeros((0, 2)), []
    for trace in reversed(traces):
        points = [*zip(trace.costs[column], trace.results, strict=True)][-len(trace.groups) :]
        places = to_axes.transform(points)
        distances = hypot(*(places[:, None] - covering).transpose(2, 0, 1))
        sizes.append(MARKER * (1 + 0.25 * (distances < HIDDEN).sum(axis=1).clip(max=3)))
        covering = concatenate([covering, places])
    return sizes[::-1]


class Look:
    """How what stands for an experiment looks in a figure; ``sizes`` of the backbone have lines of their own."""

    def __init__(self, groups: Sequence[Experiment], sizes: Iterable[str] = ()) -> None:
        self.markers = style.wait_markers(group.first.wait for group in groups)
        self.dashes: Mapping[str, Any] = dict(zip(sizes, itertools.cycle(style.DASHES)))

    def draw(self, parts: ndarray, trace: Trace, column: int, sizes: Optional[ndarray] = None) -> None:
        """Draw a thin line, small dots for what was before, and full markers with the deviation over seeds."""
        run, xs, ys = trace.groups[-1].first, trace.costs[column], trace.results
        colour, count = style.colour_of(run.learner), len(trace.groups)
        for axes in parts:
            dash = self.dashes.get(run.backbone, "-")
            axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=0.9, alpha=0.75)
            if count < len(xs):
                axes.plot(xs, ys, ".", color=colour, markersize=3.5)
            sizes = full(count, MARKER) if sizes is None else sizes
            for x, y, group, size in zip(xs[-count:], ys[-count:], trace.groups, sizes, strict=True):
                hollow, deviation, marker = group.first.replay, _anytime(group)[1], self.markers[group.first.wait]
                axes.errorbar(
                    [x], [y], yerr=[deviation] if deviation else None, color=colour, marker=marker, markersize=size,
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


def draw_trade_off(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw average perplexity or CER of complete runs against compute and size (Figures 2, 5 and 7).

    Text, as in Figure 5: each line is a learner's way through the stream, from the first update to the last arrival.
    Images, as in Figures 2 and 7: a marker for the whole stream, a line through the sizes of one learner.
    """
    complete = completed(groups)
    shown = [group for group in complete if not group.first.replay] or complete
    if not shown:
        return []
    is_text = shown[0].first.is_text
    columns: Columns = {
        "cumulative training compute (TFLOPs)": _scale_tflops,
        "parameters" if is_text else "cumulative parameters": lambda axis, costs: style.logarithmic(
            axis, costs, show_count
        ),
    }
    parts = _parts(shown, paper and is_text)
    traces = [(_text_traces if is_text else _image_traces)(part) for part in parts.values()]
    figure = _draw_parts((style.FULL_WIDTH, 3.3), parts, traces, columns)
    are_numbered = any(trace.label[:1].isdigit() for part in traces for trace in part)
    texts = said(
        "trade-off",
        is_text=is_text,
        are_numbered=are_numbered,
        have_seeds=_have_seeds(shown),
        without_replay=not shown[0].first.replay and runs.facts.replay.any(),
        missing=len(runs.facts) - runs.facts.is_complete.sum(),
        paper=len(parts) > 1,
    )
    return [Drawing("trade-off", *texts, figure)]


def _scale_tflops(axis: Axis, costs: Sequence[float]) -> None:
    style.logarithmic(axis, costs, style.show_tflops(costs))


def _parts(groups: Sequence[Experiment], paper: bool) -> dict[str, Sequence[Experiment]]:
    """Return what is drawn above each other: the runs, and the paper's results where they are asked for."""
    theirs = {paper_numbers.FIGURE_TITLE: completed(begun(paper_numbers.paper_runs()))} if paper else {}
    return {"": groups, **theirs}


def _draw_parts(
    size: tuple[float, float], parts: Mapping[str, Sequence[Experiment]], traces: Sequence[Sequence[Trace]],
    columns: Columns,
) -> Figure:  # fmt: skip
    """Draw parts of a figure below each other, a panel for each column of costs; size in inches, of each part."""
    figure, looks = style.new_figure(size[0], size[1] * len(parts)), []
    places = figure.subfigures(len(parts), 1, squeeze=False)[:, 0]
    for place, (title, groups), own in zip(places, parts.items(), traces, strict=True):
        look = Look(groups, by_size(groups) if groups[0].first.is_text else ())
        axes = grid(place, groups, own, len(columns))
        for column, (label, scale) in enumerate(columns.items()):
            scale(axes[-1, column].xaxis, [cost for trace in own for cost in trace.costs[column]])
            for trace, sizes in zip(own, marker_sizes(axes[-1, column], own, column), strict=True):
                look.draw(axes[:, column], trace, column, sizes)
            axes[-1, column].set_xlabel(label)
            write_labels(axes[:, column], own, column)
        axes[0, 0].set_title(title, loc="left")
        looks.append(look)
    write_legend(figure, looks, parts.values())
    return figure


def _text_traces(groups: Sequence[Experiment]) -> list[Trace]:
    traces = []
    for size in by_size(groups).values():
        for group, name in zip(size, names_of(size), strict=True):
            label = name.removeprefix(group.label).removeprefix(", ").removesuffix(" experts")
            traces.append(Trace.way(group, ["tflops", "params"], label))
    return traces


def _image_traces(groups: Sequence[Experiment]) -> list[Trace]:
    """Return for each learner, waiting time and variant its sizes."""
    kin: dict[str, list[Experiment]] = {}
    for same in by_size(groups).values():
        for group, name in zip(same, names_of(same), strict=True):
            kin.setdefault(name, []).append(group)
    return [Trace.through(sizes) for sizes in kin.values()]


def draw_experts(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw average perplexity against the number of experts (Figure 5, right). Language only, as there.

    Complete runs without replay; nothing where all have equally many experts.
    """
    shown = [group for group in completed(groups) if group.first.is_text and not group.first.replay]
    if len({count for group in shown for count in Trace.way(group, ["experts"]).costs[0]}) < 2:
        return []

    def scale(axis: Axis, costs: Sequence[float]) -> None:
        style.linear(axis, costs)
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))

    columns: Columns = {"experts in a layer, over all models that predict together": scale}
    parts = _parts(shown, paper)
    traces = [[Trace.way(each, ["experts"]) for each in part] for part in parts.values()]
    figure = _draw_parts((4.6, 3.2), parts, traces, columns)
    return [Drawing("experts", *said("experts", have_seeds=_have_seeds(shown), paper=paper), figure)]


def draw_replay(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw a segment from each learner without replay to the same learner with it (Figures 4 and 8).

    Complete runs that are alike but for replay; nothing where there are none.
    """
    pairs = replay_pairs(completed(groups))
    if not pairs:
        return []
    # Each learner has a panel of its own, as in Figure 8, where one panel would be crowded.
    columns: dict[str, list[Trace]] = {}
    for pair in pairs:
        columns.setdefault(pair[0].first.name if len(pairs) > CROWDED else "", []).append(Trace.through(pair))
    num_rows = -(-len(columns) // MOST_COLUMNS)
    num_columns = -(-len(columns) // num_rows)
    both = [group for pair in pairs for group in pair]
    look, costs = Look(both), [cost for traces in columns.values() for trace in traces for cost in trace.costs[0]]
    width = 4.6 if num_columns == 1 else 1.2 + 1.95 * num_columns
    figure = style.new_figure(width, 3.2 if num_rows == 1 and num_columns < 3 else 0.4 + 2.1 * num_rows)
    panels = list(columns.items())
    for row, part in enumerate(figure.subfigures(num_rows, 1, squeeze=False)[:, 0]):
        axes = grid(part, both, [], num_columns)
        for column in range(num_columns):
            place = row * num_columns + column
            if place >= len(panels):
                for each in axes[:, column]:
                    each.set_axis_off()
                continue
            for trace in panels[place][1]:
                look.draw(axes[:, column], trace, 0)
            _scale_tflops(axes[-1, column].xaxis, costs)
            axes[0, column].set_title(panels[place][0])
            if place + num_columns >= len(panels):
                axes[-1, column].set_xlabel("training TFLOPs")
    write_legend(figure, [look], [both])
    texts = said("replay", is_text=both[0].first.is_text, have_seeds=_have_seeds(both))
    return [Drawing("replay", *texts, figure)]


def replay_pairs(groups: Sequence[Experiment]) -> list[tuple[Experiment, Experiment]]:
    """Find experiments that are alike but for replay; the one without comes first."""
    without = {group.settings_but("replay"): group for group in groups if not group.first.replay}
    pairs = [(without.get(group.settings_but("replay")), group) for group in groups if group.first.replay]
    return [(one, other) for one, other in pairs if one is not None]


def _have_seeds(groups: Sequence[Experiment]) -> bool:
    return any(len(group.complete) > 1 for group in groups)
