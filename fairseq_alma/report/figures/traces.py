"""Learners in a plane of cost and result: colour for the learner, marker for the waiting time, hollow with replay.

Source: Figures 2, 4, 5, 7 and 8 of the paper.
"""

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.run_groups import RunGroup


@dataclass(frozen=True)
class Look:
    """How everything of a figure looks that stands for a group.

    Attributes:
        markers: of each waiting time.
        dashes: of each size of the backbone, where several sizes have lines of their own.
    """

    markers: Mapping[int, str]
    dashes: Mapping[str, object]

    @classmethod
    def of(cls, groups: Sequence[RunGroup], sizes: Iterable[str] = ()) -> "Look":
        """Choose for all groups of a figure.

        Args:
            groups: all of them.
            sizes: those that have lines of their own.
        """
        dashes = {size: style.DASHES[index % len(style.DASHES)] for index, size in enumerate(sizes)}
        return cls(style.wait_markers(group.first.wait for group in groups), dashes)

    def line(self, axes: Axes, xs: Sequence[float], ys: Sequence[float], group: RunGroup) -> None:
        """Draw the line of a group, thin."""
        dash = self.dashes.get(group.size, "-")
        colour = style.colour_of(group.first.learner)
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=0.9, alpha=0.75)

    def dots(self, axes: Axes, xs: Sequence[float], ys: Sequence[float], group: RunGroup) -> None:
        """Draw small dots for what was before."""
        axes.plot(xs, ys, ".", color=style.colour_of(group.first.learner), markersize=3.5)

    def mark(self, axes: Axes, x: float, y: float, deviation: float, group: RunGroup) -> None:
        """Draw the marker of a group, with its deviation over seeds."""
        run = group.first
        colour = style.colour_of(run.learner)
        face, edge = ("white", colour) if run.replay else (colour, "white")
        axes.errorbar(
            [x], [y], yerr=[deviation] if deviation else None, color=colour, marker=self.markers[run.wait],
            markersize=6.3, markerfacecolor=face, markeredgecolor=edge, markeredgewidth=1.0 if run.replay else 0.4,
            elinewidth=0.8, capsize=1.5, zorder=3,
        )  # fmt: skip

    def legend(self, figure: Figure, groups: Sequence[RunGroup], more: Sequence[Line2D] = ()) -> None:
        """Write the legend beside a figure's panels: learners, then what else tells the groups apart.

        Args:
            figure: has its panels already.
            groups: all that it shows.
            more: samples of what else it shows.
        """
        learners = dict.fromkeys((group.first.learner, group.first.name) for group in groups)
        found = [marker_sample(name, style.colour_of(learner), "o") for learner, name in learners]
        waits = sorted({group.first.wait for group in groups})
        if len(waits) > 1:
            found += [marker_sample(f"wait {wait}", style.GREY, self.markers[wait]) for wait in waits]
        if any(group.first.replay for group in groups):
            found.append(marker_sample("with replay", style.GREY, "o", is_hollow=True))
        if len(self.dashes) > 1:
            found += [
                Line2D([], [], color=style.GREY, linewidth=0.9, linestyle=dash, label=size)  # type: ignore[arg-type]
                for size, dash in self.dashes.items()
            ]
        length = 2.4 if len(self.dashes) > 1 else 1.0
        figure.legend(handles=[*found, *more], loc="outside right upper", alignment="left", handlelength=length)


def marker_sample(label: str, colour: str, marker: str, is_hollow: bool = False) -> Line2D:
    """Return a marker as a sample for a legend."""
    return Line2D(
        [], [], color=colour, marker=marker, linestyle="none", markersize=5.5, label=label,
        markerfacecolor="white" if is_hollow else colour,
    )  # fmt: skip
