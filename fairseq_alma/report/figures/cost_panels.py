"""Panels beside each other that share a vertical axis of results, each over another cost.

A learner that waits counts as untrained until its first update, so its average perplexity may be a hundred times that
of the others. Where one axis has no room for both, it is broken: a flat strip on top holds what is far above.
"""

from typing import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.number_axes import NARROW, gap_in, linear, logarithmic

_FAR_APART = 4.0  # from this factor on, results need a logarithmic axis
_PARTS = (1.0, 3.2)  # heights of the parts of a broken axis
_LABEL_GAP = 0.052  # of the height of the axes
_LABEL_REACH = (0.05, 0.02)  # of their width, and that for each letter: labels that are nearer overlap


class CostPanels:
    """A figure's panels; give it all results at once, then draw into `axes_of` each column."""

    def __init__(self, figure: FigureBase, results: Sequence[float], columns: int, label: str) -> None:
        """Lay out the panels.

        Args:
            figure: an empty one, or an empty part of one.
            results: all that will be drawn, with the ends of bars.
            columns: number of panels.
            label: of the vertical axis.
        """
        gap = gap_in(results)
        self._rows = 1 if gap is None else 2
        grid = figure.subplots(
            self._rows, columns, squeeze=False, sharex="col", sharey="row",
            gridspec_kw={"height_ratios": _PARTS[-self._rows :]},
        )  # fmt: skip
        self._grid: list[list[Axes]] = [list(line) for line in grid]
        near = [value for value in results if gap is None or value < gap]
        if max(near, default=1) > _FAR_APART * min(near, default=1) > 0:
            logarithmic(self.lower(0).yaxis, near, least_span=NARROW)
        else:
            linear(self.lower(0).yaxis, near)
        if gap is not None:
            logarithmic(self._grid[0][0].yaxis, [value for value in results if value > gap])
            for column in range(columns):
                _break_between(self._grid[0][column], self._grid[1][column])
        self.lower(0).set_ylabel(label)

    def axes_of(self, column: int) -> list[Axes]:
        """Return the axes that everything of a column is drawn into: one, or both parts of a broken one."""
        return [line[column] for line in self._grid]

    def lower(self, column: int) -> Axes:
        """Return the axes that carry a column's horizontal axis."""
        return self._grid[-1][column]

    def upper(self, column: int) -> Axes:
        """Return the axes that a column's title stands on."""
        return self._grid[0][column]

    def hide(self, column: int) -> None:
        """Leave the place of a column empty."""
        for axes in self.axes_of(column):
            style.hide(axes)

    def write(self, column: int, labels: Sequence[tuple[float, float, str, str]]) -> None:
        """Write a label beside points, moved apart where they are close; after the horizontal axis has its limits.

        Args:
            column: of the panel.
            labels: for each point its place on both axes, the text and its colour.
        """
        for axes in self.axes_of(column):
            gap = _LABEL_GAP if axes is self.lower(column) else _LABEL_GAP * _PARTS[1] / _PARTS[0]
            to_axes = axes.transScale + axes.transLimits
            placed = [(*to_axes.transform((x, y)), text, colour) for x, y, text, colour in labels]
            inside = sorted((each for each in placed if 0 <= each[1] <= 1), key=lambda each: each[0])
            while inside:
                reach = _LABEL_REACH[0] + _LABEL_REACH[1] * len(inside[0][2])
                near = [each for each in inside if each[0] - inside[0][0] < reach]
                inside = inside[len(near) :]
                heights = style.spread([each[1] for each in near], gap)
                for (x, _, text, colour), height in zip(near, heights, strict=True):
                    note = axes.text(x + 0.025, height, text, fontsize=6.5, color=colour, va="center")
                    note.set_transform(axes.transAxes)


def _break_between(upper: Axes, lower: Axes) -> None:
    """Show that two axes above each other are one with a part left out."""
    upper.spines["bottom"].set_visible(False)
    upper.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    for axes, end in ((upper, 0), (lower, 1)):
        axes.plot(
            [0], [end], transform=axes.transAxes, marker=[(-1, -0.6), (1, 0.6)], markersize=6, linestyle="none",
            color="black", clip_on=False,
        )  # fmt: skip
