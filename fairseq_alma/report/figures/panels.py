"""Panels of figures that compare curves: a column for each size of the backbone, rows where one would be crowded.

Source of the arrangement: Figure 3 of the paper (columns: sizes) and Figure 9 (rows: learners).
"""

from dataclasses import dataclass
from typing import Callable, Hashable, Optional, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.run_groups import RunGroup, by_size, names_of
from fairseq_alma.report.run_figures import RunFigures

CROWDED = 8
MOST_COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    """What is drawn into one pair of axes.

    Attributes:
        title: the size of the backbone, where there are several; on the first panel of a column.
        groups: the runs, by the names of their curves.
    """

    title: str
    groups: dict[str, RunGroup]


@dataclass(frozen=True)
class Row:
    """Panels beside each other that share their legend.

    Attributes:
        title: what its panels have in common, where there are several rows.
        panels: from left to right; None is a place without runs.
        styles: of each curve, by its name.
    """

    title: str
    panels: list[Optional[Panel]]
    styles: dict[str, "CurveStyle"]


@dataclass(frozen=True)
class CurveStyle:
    """Colour (as hexadecimal digits), marker and dashes of a curve."""

    colour: str
    marker: str
    dash: object

    def handle(self, name: str) -> Line2D:
        """Return the curve's sample for a legend; the i.i.d. control has no curve, only a marker."""
        dash = "none" if self.marker == style.IID_MARKER else self.dash
        return Line2D([], [], color=self.colour, marker=self.marker, linestyle=dash, label=name)  # type: ignore[arg-type]


def learner_of(run: RunFigures) -> str:
    """Name the learner of a run."""
    return run.name


def wait_of(run: RunFigures) -> str:
    """Name the waiting time of a run."""
    return f"wait {run.wait}" if run.iid is None else "i.i.d."


def lay_out(groups: Sequence[RunGroup], apart: Callable[[RunFigures], str] = learner_of) -> list[Row]:
    """Put groups into rows and columns of panels.

    A column is a size of the backbone; of more than four sizes, four that cover the range are shown. There is one row
    unless that makes it crowded with several learners that wait for different times.

    Args:
        groups: at least one.
        apart: what runs of different rows differ in where one would be crowded; titles the row.
    """
    sizes = by_size(groups)
    shown = _cover(list(sizes))
    named = {size: dict(zip(names_of(sizes[size]), sizes[size], strict=True)) for size in shown}
    first = [group.first for size in shown for group in sizes[size]]
    varied = len({learner_of(run) for run in first}) > 1 and len({run.wait for run in first}) > 1
    is_crowded = max(len(each) for each in named.values()) > CROWDED and varied
    waits = sorted({run.wait for run in first if run.iid is None})
    has_learner_colours = len({learner_of(run) for run in first}) > 1 and not (is_crowded and apart is learner_of)
    rows: list[Row] = []
    for name in dict.fromkeys(apart(run) for run in first) if is_crowded else [""]:
        panels: list[Optional[Panel]] = []
        for size in shown:
            chosen = {each: group for each, group in named[size].items() if name in ("", apart(group.first))}
            is_first = not any(row.panels[shown.index(size)] for row in rows)
            title = size if len(sizes) > 1 and is_first else ""
            panels.append(Panel(title, chosen) if chosen else None)
        rows.append(Row(name, panels, _styles_of(panels, has_learner_colours, waits)))
    return rows


def left_out(groups: Sequence[RunGroup]) -> list[str]:
    """Return the sizes that `lay_out` does not show."""
    sizes = list(by_size(groups))
    shown = _cover(sizes)
    return [size for size in sizes if size not in shown]


def legend_width(rows: Sequence[Row]) -> float:
    """Return the inches that the legends beside the rows take."""
    return 0.75 + 0.062 * max(len(name) for row in rows for name in row.styles)


def write_legend(axes: Axes, row: Row, place: tuple[float, float], notes: Sequence[Line2D] = ()) -> None:
    """Write a row's legend, under its title, to the right of its last panel.

    Args:
        axes: of that panel.
        row: what the legend is for.
        place: of its upper left corner, in shares of the axes.
        notes: samples that stand below those of the curves.
    """
    handles = [*(look.handle(name) for name, look in row.styles.items()), *notes]
    legend = axes.legend(
        handles=handles, title=row.title, loc="upper left", bbox_to_anchor=place, borderaxespad=0, alignment="left"
    )
    legend.get_title().set_fontweight("bold")


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
    curves = {name: group for panel in panels if panel is not None for name, group in panel.groups.items()}
    markers = style.wait_markers(group.first.wait for group in curves.values())
    chosen: dict[str, CurveStyle] = {}
    taken: dict[Hashable, int] = {}
    for index, (name, group) in enumerate(curves.items()):
        run = group.first
        marker = markers[run.wait] if run.iid is None else style.IID_MARKER
        if has_learner_colours or len(curves) == len(waits) == 1:
            colour = style.colour_of(run.learner)
        elif len(waits) > 1 and run.iid is None:
            colour = style.shades(len(waits))[waits.index(run.wait)]
        else:
            colour = style.shades(len(curves))[index]
        used = taken.get((colour, marker), 0)
        taken[colour, marker] = used + 1
        dash = style.DASHES[used % len(style.DASHES)]
        chosen[name] = CurveStyle(style.lighter(colour, min(used, 3)), marker, dash)
    return chosen
