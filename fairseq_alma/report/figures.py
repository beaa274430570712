"""Draw the figures of a report: metric by arrival, metric by cost, and metric before and after growth.

Metric by arrival corresponds to Figure 3 of the paper. Metric by cost corresponds to Figures 2, 5 and 7.

The colour of a line shows the learner. In the figure of metric by arrival, each panel shows one backbone size.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Callable, Optional, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fairseq_alma.files import open_atomically
from fairseq_alma.report.read_run import LEARNER_COLOURS, Experiment
from fairseq_alma.report.write_report import show_count

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs a line for each table of a font
MOST_PANELS = 4
MOST_MARKERS = 20
UNTRAINED_RATIO = 2.0  # the y-axis excludes an untrained model whose metric exceeds this multiple of all others
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "legend.fontsize": 7.5, "legend.frameon": False,
    "axes.titlesize": 8.5, "axes.labelsize": 8.5, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#DDDDDD", "grid.linewidth": 0.5, "lines.linewidth": 1.3, "lines.markersize": 4.2,
    "figure.facecolor": "white", "savefig.facecolor": "white", "pdf.fonttype": 42,
    "text.parse_math": False,
}  # fmt: skip
# File format -> metadata key to omit, so that files do not depend on the version of matplotlib or the time.
OMITTED_METADATA = {"png": "Software", "pdf": "CreationDate"}
LEAST_HEIGHT = 3.1  # inches
LABEL_WIDTH = 40  # characters


@dataclass(frozen=True)
class Drawing:
    """A figure of a report, with file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw_all(groups: Sequence[Experiment]) -> list[Drawing]:
    """Draw all figures of runs that use one kind of data. The first figure shows the test metric by arrival."""
    with matplotlib.rc_context(STYLE):
        drawings = [*filter(None, (draw(groups) for draw in (draw_curve, draw_trade_off, draw_growth)))]
        for figure in (drawing.figure for drawing in drawings):
            # One legend next to the panels lists each experiment once.
            handles = {
                fill(label, LABEL_WIDTH, break_on_hyphens=False): handle  # A long line leaves no space for the panels.
                for axes in figure.axes
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            figure.set_figheight(max(LEAST_HEIGHT, 0.165 * sum(label.count("\n") + 1 for label in handles)))
            figure.legend(list(handles.values()), list(handles), loc="outside right upper")
    return drawings


def write(drawing: Drawing, folder: Path) -> dict[str, Path]:
    """Write a figure as PNG and PDF, and return the paths (file name extension -> path)."""
    paths = {ending: folder / f"{drawing.name}.{ending}" for ending in OMITTED_METADATA}
    with matplotlib.rc_context(STYLE):
        for ending, path in paths.items():
            with open_atomically(path) as file:
                drawing.figure.savefig(file, format=ending, dpi=160, metadata={OMITTED_METADATA[ending]: None})
    return paths


def line_styles(groups: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Return one line style per experiment. Experiments of the same learner differ in markers and dashes."""
    colours = [LEARNER_COLOURS.get(each.first.record["learner"], "#666666") for each in groups]
    ranks = [colours[:index].count(colour) for index, colour in enumerate(colours)]
    return [
        {"color": colour, "marker": MARKERS[rank % len(MARKERS)], "linestyle": DASHES[rank % len(DASHES)]}
        for colour, rank in zip(colours, ranks, strict=True)
    ]


def draw_curve(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw the test metric of the current model at each arrival, with bands of one standard deviation over seeds."""
    begun = [each for each in groups if len(each.first.done)]
    if not begun:
        return None
    is_text = begun[0].first.is_text
    metric = "perplexity" if is_text else "error"
    courses = [(each.course.curve, int(each.course.done.idxmax())) for each in begun]  # (curve, first update)
    trained = [value for curve, first in courses for value in curve[first:] if math.isfinite(value)]
    untrained = max((value for curve, first in courses for value in curve[:first]), default=0.0)
    hides_untrained = untrained > UNTRAINED_RATIO * max(trained, default=untrained)
    counts = Counter(each.first.size for each in begun)
    sizes = [size for size in counts if size in dict(counts.most_common(MOST_PANELS))]
    figure = Figure(figsize=(2.4 + 2.6 * len(sizes), LEAST_HEIGHT), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        members = [each for each in begun if each.first.size == size]
        for each, style in zip(members, line_styles(members), strict=True):
            _draw_staircase(axes, each, style)
        axes.set(xlabel="arrival (mega-batch)", title=size if len(sizes) > 1 else "")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if hides_untrained:
        panels[0].set_ylim(0.95 * min(trained), 1.08 * max(trained))
    if is_text or 0 < min(trained, default=1) * 8 < max(trained, default=1):
        _logarithmic(panels[0].yaxis, "{:,.6g}".format)  # The panels share the axis.
    panels[0].set_ylabel(f"test {metric}{'' if is_text else ' (%)'}")
    caption = f"Test {metric} of the current model at each arrival. Bands show one standard deviation over seeds."
    if hides_untrained:
        caption += f" The {metric} of the untrained model ({untrained:,.4g}) is not shown."
    if len(counts) > len(sizes):
        caption += f" {len(sizes)} of {len(counts)} sizes are shown."
    return Drawing("curve", f"Test {metric} after each mega-batch", caption, figure)


def _draw_staircase(axes: Axes, each: Experiment, style: dict[str, Any]) -> None:
    """Draw the test metric of an experiment as a step function of arrivals, or as one marker for an i.i.d. control."""
    course = each.course[each.course.curve.notna()]
    updates = course[course.done]
    if each.first.options.get("iid"):
        axes.plot(updates.index, updates.curve, style["marker"], color=style["color"], markersize=7, label=each.name)
        return
    places, curve = [*course.index, course.index[-1] + 1], [*course.curve, course.curve.iloc[-1]]
    marked = list(range(0, len(course), max(1, len(course) // MOST_MARKERS)))  # not the end of the last step
    axes.step(places, curve, where="post", label=each.name, markevery=marked, **style)
    if course.deviation.any():
        low, high = course.curve - course.deviation, course.curve + course.deviation
        axes.fill_between(course.index, low, high, step="post", color=style["color"], alpha=0.2, linewidth=0)


def draw_trade_off(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw average perplexity or CER of complete experiments against training compute and against parameters.

    For text, each experiment is a line over the arrivals (Figure 5). For images, each is one point (Figures 2 and 7).
    """
    complete = [each for each in groups if each.is_complete]
    if not complete:
        return None
    is_text = complete[0].first.is_text
    figure = Figure(figsize=(8.2, LEAST_HEIGHT), layout="constrained")
    flops, sizes = figure.subplots(1, 2, sharey=True)
    for each, style in zip(complete, line_styles(complete), strict=True):
        found = each.spread(lambda run: run.over_stream)
        assert found is not None
        course = each.course.iloc[each.first.done.index[0] if is_text else -1 :]
        ys = course.average if is_text else [found.mean]
        error = None if math.isnan(found.deviation) else [found.deviation]
        for axes, xs in ((flops, course.tflops * 1e12), (sizes, course.params if is_text else [each.first.memory])):
            axes.plot(xs, ys, linewidth=0.9, label=each.name, markersize=3, **style)
            axes.errorbar(xs[-1:], ys[-1:], error, markersize=6, capsize=2, **style)
    size = "parameters" if is_text else "Mem (parameters, summed over arrivals)"
    for axes, cost in ((flops, "training FLOPs"), (sizes, size)):
        axes.set_xlabel(cost)
        _logarithmic(axes.xaxis, show_count)
        _logarithmic(axes.yaxis, "{:,.6g}".format)
    flops.set_ylabel("average test perplexity" if is_text else "CER (percentage points)")
    caption = "Lower and farther left is better. " + (
        "Each line goes from the first update of a learner to the last arrival (large marker)."
        if is_text
        else "Markers show results over the full stream. Error bars show one standard deviation over seeds."
    )
    return Drawing("trade-off", "Result against cost", caption, figure)


def draw_growth(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw the validation metric before and after each growth step, and after training the grown model."""
    grown = [each for each in groups if each.first.done.after_growth.notna().any()]
    if not grown:
        return None
    scale = 1 if grown[0].first.is_text else 100
    figure = Figure(figsize=(6.2, LEAST_HEIGHT), layout="constrained")
    axes = figure.subplots()
    for each, style in zip(grown, line_styles(grown), strict=True):
        steps = each.first.done[each.first.done.after_growth.notna()]
        for arrival, *ys in steps[["before_growth", "after_growth", "valid"]].itertuples():
            xs = [arrival - 0.35, arrival - 0.25, arrival]
            label = each.name if arrival == steps.index[0] else None
            axes.plot(xs, [scale * y for y in ys], markersize=3.5, label=label, **style)
    axes.set_xlabel("arrival (mega-batch)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("validation perplexity" if scale == 1 else "validation error (%)")
    caption = "Each growth step has three points: before the step, after the step, and after training the grown model."
    return Drawing("growth", "Growth steps", caption, figure)


def _logarithmic(axis: Axis, show: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with fewer ticks per decade for a wider range."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    steps = (1.0,) if 0 < low * 3000 < high else (1.0, 2.0, 5.0) if 0 < low * 5 < high else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
