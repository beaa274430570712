"""Panels of figures that compare curves: a column for each size of the backbone, rows where one would be crowded.

Source of the arrangement: Figure 3 of the paper (columns: sizes) and Figure 9 (rows: learners).
"""

from dataclasses import dataclass
from typing import Any, Callable, Hashable, NamedTuple, Optional, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import ndarray

from fairseq_alma.report.experiment import Experiment, by_size, names_of
from fairseq_alma.report.figures import style

CROWDED = 8
MOST_COLUMNS = 4


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
        panels: list[Optional[Panel]] = []
        for column, size in enumerate(shown):
            chosen = {each: group for each, group in named[size].items() if name in ("", getattr(group.first, apart))}
            is_first = len(sizes) > 1 and not any(row.panels[column] for row in rows)
            panels.append(Panel(size if is_first else "", chosen) if chosen else None)
        rows.append(Row(name, panels, _styles_of(panels, has_learner_colours, waits)))
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
) -> ndarray:  # fmt: skip
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
            if panel is None:
                axes.set_axis_off()
            else:
                draw_panel(axes, panel, row)
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
