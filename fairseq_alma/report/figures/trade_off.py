"""The trade-off: average perplexity or CER against what it cost (Figures 2, 5 and 7 of the paper).

Text, as in Figure 5: each line is a learner's way through the stream, from the first update to the last arrival.
Images, as in Figures 2 and 7: a marker for the whole stream, a line through the sizes of one learner.
"""

import statistics
from dataclasses import dataclass
from typing import Sequence

from matplotlib.figure import FigureBase

from fairseq_alma.report.figures import paper_runs, style
from fairseq_alma.report.figures.cost_panels import CostPanels
from fairseq_alma.report.figures.number_axes import logarithmic, show_params, show_tflops
from fairseq_alma.report.figures.run_groups import (
    RunGroup,
    anytime_label,
    by_size,
    complete_groups,
    detail_of,
    names_of,
)
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.figures.traces import Look, write_legend
from fairseq_alma.report.figures.trajectory import TERA, trajectory
from fairseq_alma.report.run_figures import RunFigures

NAME = "trade-off"
TITLE = "Trade-off of result, compute and size"
LONGEST_LABEL = 16


@dataclass(frozen=True)
class Trace:
    """What is drawn of one group, or of one learner in several sizes.

    Attributes:
        groups: that of each marker; the last one's looks are the line's.
        costs: for each panel, the cost at each point of the line.
        results: at each point of the line.
        marks: places on the line that get the full marker, one for each of the groups.
        label: what tells the trace from others of its learner and wait.
    """

    groups: tuple[RunGroup, ...]
    costs: tuple[tuple[float, ...], tuple[float, ...]]
    results: tuple[float, ...]
    marks: tuple[int, ...]
    label: str


def draw(runs: Sequence[RunFigures], paper: bool = False) -> list[Drawing]:
    """Draw the two trade-offs of complete runs on one stream; nothing where there is none.

    Args:
        runs: on one stream.
        paper: for text, draw the paper's results below.
    """
    complete = complete_groups(runs)
    groups = [group for group in complete if not group.first.replay] or complete
    if not groups:
        return []
    parts = [("", groups)]
    if paper and groups[0].first.is_text:
        parts.append((paper_runs.TITLE, complete_groups(paper_runs.paper_runs())))
    figure = style.new_figure(style.FULL_WIDTH, 3.3 * len(parts))
    looks = [
        _draw_part(part, title, shown)
        for part, (title, shown) in zip(figure.subfigures(len(parts), 1, squeeze=False)[:, 0], parts, strict=True)
    ]
    write_legend(figure, looks, [shown for _, shown in parts])
    caption = _caption(groups, runs) + (paper_runs.CAPTION if len(parts) > 1 else "")
    return [Drawing(NAME, TITLE, caption, figure)]


def _draw_part(figure: FigureBase, title: str, groups: Sequence[RunGroup]) -> Look:
    """Draw two panels and return how the groups look in them."""
    first = groups[0].first
    traces = _text_traces(groups) if first.is_text else _image_traces(groups)
    results = [result for trace in traces for result in trace.results]
    results += [end for group in groups for end in group.bar]
    panels = CostPanels(figure, results, 2, anytime_label(first))
    look = Look.of(groups, by_size(groups) if first.is_text else ())
    for column, label in enumerate(_cost_labels(first.is_text)):
        costs = [cost for trace in traces for cost in trace.costs[column]]
        logarithmic(panels.lower(column).xaxis, costs, show_tflops(costs) if column == 0 else show_params)
        panels.lower(column).set_xlabel(label)
        for trace in traces:
            _draw_trace(panels, column, trace, look)
        panels.write(column, _labels_of(traces, column))
    panels.upper(0).set_title(title, loc="left")
    return look


def _text_traces(groups: Sequence[RunGroup]) -> list[Trace]:
    """Return the way of each group through the stream."""
    traces = []
    for size in by_size(groups).values():
        for group, name in zip(size, names_of(size), strict=True):
            points = trajectory(group)
            costs = tuple(point.tflops for point in points), tuple(point.params for point in points)
            results = tuple(point.average for point in points)
            label = detail_of(group, name).removesuffix(" experts")
            traces.append(Trace((group,), costs, results, (len(points) - 1,), label))
    return traces


def _image_traces(groups: Sequence[RunGroup]) -> list[Trace]:
    """Return for each learner, waiting time and variant its sizes."""
    kin: dict[str, list[RunGroup]] = {}
    for same in by_size(groups).values():
        for group, name in zip(same, names_of(same), strict=True):
            kin.setdefault(name, []).append(group)
    traces = []
    for sizes in kin.values():
        complete = [group.experiment.complete for group in sizes]
        tflops = tuple(statistics.fmean(run.computation / TERA for run in same) for same in complete)
        memory = tuple(statistics.fmean(run.memory or 0.0 for run in same) for same in complete)
        results = tuple(group.anytime[0] for group in sizes)
        traces.append(Trace(tuple(sizes), (tflops, memory), results, tuple(range(len(sizes))), ""))
    return traces


def _draw_trace(panels: CostPanels, column: int, trace: Trace, look: Look) -> None:
    """Draw a line with its dots and full markers into a column."""
    costs = trace.costs[column]
    for axes in panels.axes_of(column):
        look.line(axes, costs, trace.results, trace.groups[-1])
        if len(trace.marks) < len(costs):
            look.dots(axes, costs, trace.results, trace.groups[-1])
        for place, group in zip(trace.marks, trace.groups, strict=True):
            look.mark(axes, costs[place], trace.results[place], group.anytime[1], group)


def _labels_of(traces: Sequence[Trace], column: int) -> list[tuple[float, float, str, str]]:
    """Return what `CostPanels.write` writes beside the last points."""
    return [
        (trace.costs[column][-1], trace.results[-1], trace.label[:LONGEST_LABEL], _colour(trace))
        for trace in traces
        if trace.label
    ]


def _colour(trace: Trace) -> str:
    return style.colour_of(trace.groups[-1].first.learner)


def _cost_labels(is_text: bool) -> tuple[str, str]:
    compute = "cumulative training compute (TFLOPs)"
    return compute, "parameters" if is_text else "cumulative parameters"


def _caption(groups: Sequence[RunGroup], runs: Sequence[RunFigures]) -> str:
    first = groups[0].first
    if first.is_text:
        words = [
            "Average test perplexity over the arrivals so far against training compute so far and against the "
            "parameters of what predicts. Each line is a learner's way through the stream, a dot for each arrival "
            "from its first update on, the marker at the end; numbers are experts."
        ]
    else:
        words = [
            "Cumulative error rate over the whole stream against training compute and parameters, both summed over "
            "all arrivals. Lines join the sizes of one learner's backbone."
        ]
    words.append("Down and to the left is better; 1 TFLOP is 10^12 operations.")
    if any(len(group.experiment.complete) > 1 for group in groups):
        words.append("Mean over seeds, bars: standard deviation.")
    if not first.replay and any(run.replay for run in runs):
        words.append("Without replay.")
    missing = sum(not run.is_complete for run in runs)
    if missing:
        words.append(f"{missing} run{'s that are' if missing > 1 else ' that is'} not complete left out.")
    return " ".join(words)
