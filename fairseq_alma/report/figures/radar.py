"""The radar: result, memory, training and test compute of each learner at a glance (v1 of the paper, Figure 3)."""

import math
import statistics
from collections import Counter
from typing import Callable, Sequence

import numpy
from matplotlib.projections.polar import PolarAxes

from fairseq_alma.metrics.anytime import cumulative_memory
from fairseq_alma.report.figures import panels, style
from fairseq_alma.report.figures.panels import Panel, Row
from fairseq_alma.report.figures.run_groups import RunGroup, complete_groups
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.run_figures import RunFigures

NAME = "radar"
TITLE = "Result, memory and compute"
CENTRE = 0.12  # where the axes start, so that small values do not all meet in one point
RINGS = (0.25, 0.5, 0.75, 1.0)


def draw(runs: Sequence[RunFigures]) -> list[Drawing]:
    """Draw the complete runs of each size that has at least two of them to compare."""
    groups = complete_groups(runs)
    without = [group for group in groups if not group.first.replay]
    rows = _comparing(without if len(without) > 1 else groups)
    if not rows:
        return []
    columns = len(rows[0].panels)
    figure = style.new_figure(2.2 * columns + 0.75 + panels.legend_width(rows), 0.3 + 2.0 * len(rows))
    for number, row in enumerate(rows):
        for column, panel in enumerate(row.panels):
            place = number * columns + column + 1
            axes = figure.add_subplot(len(rows), columns, place, projection="polar")
            assert isinstance(axes, PolarAxes)
            if panel is None:
                style.hide(axes)
                continue
            _draw_panel(axes, panel, row)
        panels.write_legend(axes, row, (1.25, 1.05))
    return [Drawing(NAME, TITLE, _caption(groups[0].first, without != groups), figure)]


def _comparing(groups: Sequence[RunGroup]) -> list[Row]:
    """Lay out what can be compared: a panel of one run would show nothing but that it is all there is."""
    is_parted = len(panels.lay_out(groups, panels.wait_of)) > 1 if groups else False

    def panel_of(group: RunGroup) -> tuple[str, int]:
        return group.size, group.first.wait if is_parted else 0

    sizes = Counter(map(panel_of, groups))
    chosen = [group for group in groups if sizes[panel_of(group)] > 1]
    return panels.lay_out(chosen, panels.wait_of) if chosen else []


def _measures(is_text: bool) -> dict[str, Callable[[RunFigures], float]]:
    """Return the axes, clockwise from the top; each is better where it is smaller."""
    return {
        "log avg\nPPL" if is_text else "CER": lambda run: _result(run),
        "Mem": lambda run: run.memory or 0.0,
        "Comp\ntrain": lambda run: run.computation,
        "Comp\ntest": lambda run: cumulative_memory(run.test_flops, run.num_arrivals),
    }


def _result(run: RunFigures) -> float:
    """Return CER, or the logarithm of the average perplexity: zero stands for a perfect model on both."""
    assert run.anytime is not None
    return math.log(run.anytime) if run.is_text else run.anytime


def _values(group: RunGroup) -> list[float]:
    measures = _measures(group.first.is_text).values()
    return [statistics.fmean(measure(run) for run in group.experiment.complete) for measure in measures]


def _draw_panel(axes: PolarAxes, panel: Panel, row: Row) -> None:
    first = next(iter(panel.groups.values())).first
    names = list(_measures(first.is_text))
    angles = numpy.linspace(0, 2 * math.pi, len(names), endpoint=False)
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    values = {name: _values(group) for name, group in panel.groups.items()}
    # Not shared between panels: one learner of extreme cost would press all others into the centre.
    most = [max(each) or 1.0 for each in zip(*values.values(), strict=True)]
    for name, found in values.items():
        shares = [value / largest for value, largest in zip(found, most, strict=True)]
        look = row.styles[name]
        axes.plot(
            [*angles, angles[0]], [*shares, shares[0]], color=look.colour, linestyle=look.dash, marker=look.marker,
            markersize=3,
        )  # fmt: skip
    axes.set_rlim(-CENTRE, 1.04)  # room for the markers on the outer ring
    axes.set_rgrids(RINGS, [])
    axes.set_thetagrids(numpy.degrees(angles), names, fontsize=7)
    axes.tick_params(axis="x", pad=2)
    axes.spines["polar"].set_visible(False)
    if panel.title:
        axes.set_title(panel.title, pad=10)


def _caption(first: RunFigures, is_without_replay: bool) -> str:
    result = "the logarithm of the average test perplexity" if first.is_text else "cumulative error rate (CER)"
    words = [
        f"Four costs of each learner over the stream: {result}, memory (Mem: parameters summed over arrivals), "
        "training compute, and compute of a prediction summed over arrivals. Each axis goes from 0 to the largest "
        "value in its panel, so panels do not compare; rings stand at quarters, nearer to the centre is better. "
        "Complete runs, means over seeds."
    ]
    if is_without_replay:
        words.append("Without replay.")
    return " ".join(words)
