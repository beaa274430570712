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


def write_legend(figure: Figure, looks: Sequence[Look], groups: Sequence[Sequence[RunGroup]]) -> None:
    """Write the legend beside a figure: learners, then what else tells the groups apart.

    Args:
        figure: has its panels already.
        looks: of each part of the figure.
        groups: what each part shows.
    """
    runs = [group.first for part in groups for group in part]
    learners = dict.fromkeys((run.learner, run.name) for run in runs)
    found = [marker_sample(name, style.colour_of(learner), "o") for learner, name in learners]
    waits = sorted({run.wait for run in runs})
    if len(waits) > 1:
        markers = {wait: marker for look in looks for wait, marker in look.markers.items()}
        found += [marker_sample(f"wait {wait}", style.GREY, markers[wait]) for wait in waits]
    if any(run.replay for run in runs):
        found.append(marker_sample("with replay", style.GREY, "o", is_hollow=True))
    sizes = _size_samples(looks)
    found += sizes
    figure.legend(handles=found, loc="outside right upper", alignment="left", handlelength=2.4 if sizes else 1.0)


def _size_samples(looks: Sequence[Look]) -> list[Line2D]:
    """Return a sample for each kind of dashes; sizes of the runs and of the paper's results below share them."""
    labels: dict[str, list[str]] = {}
    dashes: dict[str, object] = {}
    for index, look in enumerate(looks):
        for size, dash in look.dashes.items() if len(look.dashes) > 1 else ():
            labels.setdefault(str(dash), []).append(size if index == 0 else f"{size} (paper)")
            dashes[str(dash)] = dash
    return [
        Line2D([], [], color=style.GREY, linewidth=0.9, linestyle=dashes[key], label="\n".join(names))  # type: ignore[arg-type]
        for key, names in labels.items()
    ]


def marker_sample(label: str, colour: str, marker: str, is_hollow: bool = False) -> Line2D:
    """Return a marker as a sample for a legend."""
    return Line2D(
        [], [], color=colour, marker=marker, linestyle="none", markersize=5.5, label=label,
        markerfacecolor="white" if is_hollow else colour,
    )  # fmt: skip
