"""The anytime curve: the value of what predicts after each arrival (Figures 1, 3 and 9 of the paper)."""

import math
from functools import partial
from typing import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.figures import panels, style
from fairseq_alma.report.figures.panels import CurveStyle, Panel, Row
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import SCALE, RunTable

MOST_MARKERS = 20  # curves with more updates carry some markers only
MOST_BAND_POINTS = 120  # more would not be seen, and make a large file
FAR = 2.0  # an untrained model that is worse than all others by this factor is left above the axis
WIDE_ERRORS = 8.0  # errors that fall by this factor need a logarithmic axis


def draw(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the curves of experiments on one stream; nothing where no run was updated yet."""
    if not groups:
        return []
    rows = panels.lay_out(groups)
    columns = len(rows[0].panels)
    width, height = (3.6, 3.2) if columns * len(rows) == 1 else (1.95 * columns + 0.3, 1.9 if len(rows) <= 3 else 1.45)
    figure = style.new_figure(width + panels.legend_width(rows), height * len(rows) + (0.5 if len(rows) > 1 else 0.1))
    limits = _Limits(groups)
    draw_panel = partial(_draw_panel, limits)
    grid = panels.draw_rows(figure, rows, draw_panel, (1.03, 1.02), limits.cut_note(), sharex=True, sharey=True)
    for line in grid:
        first = next(axes for axes in line if axes.axison)
        first.set_ylabel("test perplexity" if groups[0].first.is_text else "test error (%)")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel("arrival (mega-batch)")
        lowest.tick_params(labelbottom=True)
    return [Drawing("anytime-curve", "Anytime curves", _caption(groups, limits.is_cut), figure)]


class _Limits:
    """What the vertical axis shows, the same in all panels; ``is_cut``: not the untrained model, which is far above."""

    def __init__(self, groups: Sequence[Experiment]) -> None:
        first = groups[0].first
        values = [value for group in groups for value in group.course.curve[group.course.done.idxmax() :]]
        trained = [value for value in values if math.isfinite(value)] or [1.0]
        self.untrained = max(group.first.untrained * SCALE[group.first.kind] for group in groups)
        self.is_cut = self.untrained > FAR * max(trained)
        self.waits_first = any(not group.course.done[0] for group in groups)
        self.shown = [*trained, *([self.untrained] if self.waits_first and not self.is_cut else [])]
        is_wide = first.is_text or max(trained) > WIDE_ERRORS * max(min(trained), 1e-9)
        self.is_logarithmic = is_wide and min(self.shown) > 0

    def apply(self, axes: Axes) -> None:
        if self.is_logarithmic:
            style.logarithmic(axes.yaxis, self.shown, least_span=style.NARROW)
        else:
            style.linear(axes.yaxis, self.shown)

    def cut_note(self) -> list[Line2D]:
        """Return the legend's entry for what is left above the axes."""
        label = f"untrained: {style.plain(self.untrained)}"
        return [style.sample(label, style.GREY, "$\\uparrow$")] if self.waits_first and self.is_cut else []


def _draw_panel(limits: _Limits, axes: Axes, panel: Panel, row: Row) -> None:
    num_arrivals = max(group.first.num_arrivals for group in panel.groups.values())
    for index, (name, group) in enumerate(panel.groups.items()):
        look = row.styles[name]
        if not group.first.iid:
            _draw_curve(axes, group, look, shift=index / len(panel.groups))
        else:
            updates = group.course[group.course.done]
            axes.plot(
                updates.index, updates.curve, linestyle="none", markersize=8, marker=look.marker, color=look.colour,
                markeredgecolor="white", markeredgewidth=0.4,
            )  # fmt: skip
    limits.apply(axes)
    axes.set_xlim(-0.02 * num_arrivals, num_arrivals * 1.01)
    style.arrival_axis(axes.xaxis, range(num_arrivals), num_arrivals, 5)
    if panel.title:
        axes.set_title(panel.title)


def _draw_curve(axes: Axes, group: Experiment, look: CurveStyle, shift: float) -> None:
    """Draw a staircase: each value holds from its arrival until the next one."""
    course = group.course
    updates = course.index[course.done].to_numpy()
    places = numpy.array(sorted({0, *updates, len(course)}))  # where the curve may change, and its end
    curve = numpy.append(course.curve, course.curve.iloc[-1])
    axes.step(places, curve[places], where="post", color=look.colour, linestyle=look.dash)
    if course.deviation.any():
        deviation = numpy.append(course.deviation, course.deviation.iloc[-1])
        kept = places[:: 1 + len(places) // MOST_BAND_POINTS]
        low, high = (curve - deviation)[kept], (curve + deviation)[kept]
        axes.fill_between(kept, low, high, step="post", color=look.colour, alpha=0.2, linewidth=0)
    if len(updates) > MOST_MARKERS:
        distance = len(updates) // 8
        updates = updates[int(shift * distance) :: distance]
    axes.plot(updates, curve[updates], linestyle="none", marker=look.marker, color=look.colour)


def _caption(groups: Sequence[Experiment], is_cut: bool) -> str:
    value = "Test perplexity" if groups[0].first.is_text else "Test error"
    words = [
        f"{value} of what predicts after each arrival, lower is better. While a learner waits, the model of its last "
        "update counts, before the first update an untrained one; markers stand at updates."
    ]
    if is_cut:
        words.append("The axis ends below the untrained model.")
    if any((group.runs.num_known == group.runs.num_known.max()).sum() > 1 for group in groups):
        words.append("Line and band: mean and standard deviation over runs that differ by their seeds alone.")
    if any(group.first.iid for group in groups):
        words.append("Stars: the i.i.d. control, trained on that many mega-batches at once.")
    if not all(len(group.complete) for group in groups):
        words.append("A curve that ends early belongs to a run that is not complete.")
    if left := panels.left_out(groups):
        words.append(f"Not shown: {'; '.join(left)}.")
    return " ".join(words)
