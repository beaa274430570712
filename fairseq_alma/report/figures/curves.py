"""Figures that compare curves: the anytime curve, and the radar of result, memory and compute.

Panels stand in a column for each size of the backbone, in rows where one would be crowded. Source of the arrangement:
Figure 3 of the paper (columns: sizes) and Figure 9 (rows: learners); of the radar v1 of the paper, Figure 3.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Hashable, NamedTuple, Optional, Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.projections.polar import PolarAxes

from fairseq_alma.report.experiment import Experiment, by_size, completed, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import SCALE, RunTable
from fairseq_alma.report.spelling import said

CROWDED = 8
MOST_COLUMNS = 4
MOST_MARKERS = 20  # curves with more updates carry some markers only
MOST_BAND_POINTS = 120  # more would not be seen, and make a large file
FAR = 2.0  # an untrained model that is worse than all others by this factor is left above the axis
WIDE_ERRORS = 8.0  # errors that fall by this factor need a logarithmic axis
CENTRE = 0.12  # where the axes of a radar start, so that small values do not all meet in one point
RINGS = (0.25, 0.5, 0.75, 1.0)
# Clockwise from the top; each is better where it is smaller.
RADAR_MEASURES = {"Mem": "memory", "Comp\ntrain": "computation", "Comp\ntest": "test_memory"}


class CurveStyle(NamedTuple):
    """Colour (as hexadecimal digits), marker and dashes of a curve."""

    colour: str
    marker: str
    dash: Any

    def handle(self, name: str) -> Line2D:
        """Return the curve's sample for a legend; the i.i.d. control has no curve, only a marker."""
        dash = "none" if self.marker == style.IID_MARKER else self.dash
        return style.sample(name, self.colour, self.marker, dash)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the size of the backbone, on the first of a column; experiments by names of their curves."""

    title: str
    groups: dict[str, Experiment]


@dataclass(frozen=True)
class Row:
    """Panels beside each other, None where there are no runs, that share a legend.

    ``title`` is what they have in common, where there are several rows; ``styles`` those of the curves, by name.
    """

    title: str
    panels: list[Optional[Panel]]
    styles: dict[str, CurveStyle]


def lay_out(groups: Sequence[Experiment], apart: str = "name") -> list[Row]:
    """Put experiments into rows and columns of panels.

    A column is a size of the backbone; of more than four sizes, four that cover the range are shown. There is one row
    unless that makes it crowded with several learners that wait for different times; then runs in different rows differ
    in the fact ``apart`` (of the learner its name), which titles the row.
    """
    sizes = by_size(groups)
    shown = _cover(list(sizes))
    named = {size: dict(zip(names_of(sizes[size]), sizes[size], strict=True)) for size in shown}
    first = [group.first for size in shown for group in sizes[size]]
    several_learners = len({run.name for run in first}) > 1
    is_crowded = max(map(len, named.values())) > CROWDED and several_learners and len({run.wait for run in first}) > 1
    waits = sorted({run.wait for run in first if not run.iid})
    has_learner_colours = several_learners and not (is_crowded and apart == "name")
    rows: list[Row] = []
    for name in dict.fromkeys(getattr(run, apart) for run in first) if is_crowded else [""]:
        places: list[Optional[Panel]] = []
        for column, size in enumerate(shown):
            chosen = {each: group for each, group in named[size].items() if name in ("", getattr(group.first, apart))}
            is_first = len(sizes) > 1 and not any(row.panels[column] for row in rows)
            places.append(Panel(size if is_first else "", chosen) if chosen else None)
        rows.append(Row(name, places, _styles_of(places, has_learner_colours, waits)))
    return rows


def left_out(groups: Sequence[Experiment]) -> list[str]:
    """Return the sizes that `lay_out` does not show."""
    sizes = list(by_size(groups))
    return [size for size in sizes if size not in _cover(sizes)]


def legend_width(rows: Sequence[Row]) -> float:
    """Return the inches that the legends beside the rows take."""
    return 0.75 + 0.062 * max(len(name) for row in rows for name in row.styles)


def draw_rows(
    figure: Figure, rows: Sequence[Row], draw_panel: Callable[[Any, Panel, Row], None], place: tuple[float, float],
    notes: Sequence[Line2D] = (), **layout: Any,
) -> numpy.ndarray:  # fmt: skip
    """Draw panels with a legend beside each row, and return their axes, (rows, columns).

    Args:
        figure: an empty one.
        rows: see `lay_out`.
        draw_panel: draws what a panel holds.
        place: of a legend, in shares of its row's last axes.
        notes: samples below the curves of the first row.
        layout: of ``Figure.subplots``.
    """
    grid = figure.subplots(len(rows), len(rows[0].panels), squeeze=False, **layout)
    for row, line in zip(rows, grid, strict=True):
        for axes, panel in zip(line, row.panels, strict=True):
            axes.set_axis_off() if panel is None else draw_panel(axes, panel, row)
        handles = [*(look.handle(name) for name, look in row.styles.items()), *(notes if row is rows[0] else ())]
        legend = line[-1].legend(
            handles=handles, title=row.title, loc="upper left", bbox_to_anchor=place, borderaxespad=0, alignment="left"
        )
        legend.get_title().set_fontweight("bold")
    return grid


def _cover(sizes: Sequence[str]) -> list[str]:
    """Choose sizes from the smallest to the largest, evenly."""
    if len(sizes) <= MOST_COLUMNS:
        return list(sizes)
    return [sizes[round(place * (len(sizes) - 1) / (MOST_COLUMNS - 1))] for place in range(MOST_COLUMNS)]


def _styles_of(
    panels: Sequence[Optional[Panel]], has_learner_colours: bool, waits: Sequence[int]
) -> dict[str, CurveStyle]:
    """Choose how the curves of a row look: colour for the learner, marker for the wait, dashes for the rest.

    Without learners to tell apart, colour stands for the waiting time, dark to light; with one waiting time too, for
    whatever else tells the runs apart.
    """
    curves = {name: group.first for panel in panels if panel is not None for name, group in panel.groups.items()}
    markers = style.wait_markers(run.wait for run in curves.values())
    chosen: dict[str, CurveStyle] = {}
    taken: dict[Hashable, int] = {}
    for index, (name, run) in enumerate(curves.items()):
        marker = style.IID_MARKER if run.iid else markers[run.wait]
        if has_learner_colours or len(curves) == len(waits) == 1:
            colour = style.colour_of(run.learner)
        elif len(waits) > 1 and not run.iid:
            colour = style.shades(len(waits))[waits.index(run.wait)]
        else:
            colour = style.shades(len(curves))[index]
        used = taken[colour, marker] = taken.get((colour, marker), -1) + 1
        chosen[name] = CurveStyle(style.lighter(colour, min(used, 3)), marker, style.DASHES[used % len(style.DASHES)])
    return chosen


def draw_curves(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the curves of experiments on one stream; nothing where no run was updated yet."""
    if not groups:
        return []
    rows = lay_out(groups)
    columns = len(rows[0].panels)
    width, height = (3.6, 3.2) if columns * len(rows) == 1 else (1.95 * columns + 0.3, 1.9 if len(rows) <= 3 else 1.45)
    figure = style.new_figure(width + legend_width(rows), height * len(rows) + (0.5 if len(rows) > 1 else 0.1))
    limits = _Limits(groups)
    draw_panel = partial(_draw_curves, limits)
    grid = draw_rows(figure, rows, draw_panel, (1.03, 1.02), limits.cut_note(), sharex=True, sharey=True)
    for line in grid:
        first = next(axes for axes in line if axes.axison)
        first.set_ylabel("test perplexity" if groups[0].first.is_text else "test error (%)")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel("arrival (mega-batch)")
        lowest.tick_params(labelbottom=True)
    texts = said(
        "anytime-curve",
        is_text=groups[0].first.is_text,
        is_cut=limits.is_cut,
        have_seeds=any((group.runs.num_known == group.runs.num_known.max()).sum() > 1 for group in groups),
        has_iid=any(group.first.iid for group in groups),
        are_short=not all(len(group.complete) for group in groups),
        left_out=left_out(groups),
    )
    return [Drawing("anytime-curve", *texts, figure)]


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


def _draw_curves(limits: _Limits, axes: Axes, panel: Panel, row: Row) -> None:
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


def draw_radar(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the complete runs of each size that has at least two of them to compare."""
    complete = completed(groups)
    without = [group for group in complete if not group.first.replay]
    rows = _comparing(without if len(without) > 1 else complete)
    if not rows:
        return []
    columns = len(rows[0].panels)
    figure = style.new_figure(2.2 * columns + 0.75 + legend_width(rows), 0.3 + 2.0 * len(rows))
    draw_rows(figure, rows, _draw_radar, (1.25, 1.05), subplot_kw={"projection": "polar"})
    texts = said("radar", is_text=complete[0].first.is_text, without_replay=len(without) < len(complete))
    return [Drawing("radar", *texts, figure)]


def _comparing(groups: Sequence[Experiment]) -> list[Row]:
    """Lay out what can be compared: a panel of one run would show nothing but that it is all there is."""
    is_parted = len(lay_out(groups, "shown_wait")) > 1 if groups else False
    places = [(group.first.backbone, group.first.wait if is_parted else 0) for group in groups]
    sizes = Counter(places)
    chosen = [group for group, place in zip(groups, places, strict=True) if sizes[place] > 1]
    return lay_out(chosen, "shown_wait") if chosen else []


def _draw_radar(axes: PolarAxes, panel: Panel, row: Row) -> None:
    is_text = next(iter(panel.groups.values())).first.is_text
    names = ["log avg\nPPL" if is_text else "CER", *RADAR_MEASURES]
    angles = numpy.linspace(0, 2 * numpy.pi, len(names), endpoint=False)
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    values = []
    for group in panel.groups.values():
        anytime = group.complete.anytime
        # Zero stands for a perfect model on both.
        means = [(numpy.log(anytime) if is_text else anytime).mean()]
        values.append([*means, *(group.complete[column].mean() for column in RADAR_MEASURES.values())])
    # Not shared between panels: one learner of extreme cost would press all others into the centre.
    table = numpy.array(values, dtype=float)
    most = table.max(axis=0)
    shares = table / numpy.where(most == 0, 1.0, most)
    for name, share in zip(panel.groups, shares, strict=True):
        look = row.styles[name]
        axes.plot(
            [*angles, angles[0]], [*share, share[0]], color=look.colour, linestyle=look.dash, marker=look.marker,
            markersize=3,
        )  # fmt: skip
    axes.set_rlim(-CENTRE, 1.04)  # room for the markers on the outer ring
    axes.set_rgrids(RINGS, [])
    axes.set_thetagrids(numpy.degrees(angles), names, fontsize=7)
    axes.tick_params(axis="x", pad=2)
    axes.spines["polar"].set_visible(False)
    if panel.title:
        axes.set_title(panel.title, pad=10)
