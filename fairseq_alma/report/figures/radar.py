"""The radar: result, memory, training and test compute of each learner at a glance (v1 of the paper, Figure 3)."""

from collections import Counter
from typing import Sequence

import numpy
from matplotlib.projections.polar import PolarAxes

from fairseq_alma.report.experiment import Experiment, completed
from fairseq_alma.report.figures import panels, style
from fairseq_alma.report.figures.panels import Panel, Row
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import RunTable

CENTRE = 0.12  # where the axes start, so that small values do not all meet in one point
RINGS = (0.25, 0.5, 0.75, 1.0)
# Clockwise from the top; each is better where it is smaller.
MEASURES = {"Mem": "memory", "Comp\ntrain": "computation", "Comp\ntest": "test_memory"}


def draw(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the complete runs of each size that has at least two of them to compare."""
    complete = completed(groups)
    without = [group for group in complete if not group.first.replay]
    rows = _comparing(without if len(without) > 1 else complete)
    if not rows:
        return []
    columns = len(rows[0].panels)
    figure = style.new_figure(2.2 * columns + 0.75 + panels.legend_width(rows), 0.3 + 2.0 * len(rows))
    panels.draw_rows(figure, rows, _draw_panel, (1.25, 1.05), subplot_kw={"projection": "polar"})
    caption = _caption(complete[0].first.is_text, len(without) < len(complete))
    return [Drawing("radar", "Result, memory and compute", caption, figure)]


def _comparing(groups: Sequence[Experiment]) -> list[Row]:
    """Lay out what can be compared: a panel of one run would show nothing but that it is all there is."""
    is_parted = len(panels.lay_out(groups, "shown_wait")) > 1 if groups else False
    places = [(group.first.backbone, group.first.wait if is_parted else 0) for group in groups]
    sizes = Counter(places)
    chosen = [group for group, place in zip(groups, places, strict=True) if sizes[place] > 1]
    return panels.lay_out(chosen, "shown_wait") if chosen else []


def _draw_panel(axes: PolarAxes, panel: Panel, row: Row) -> None:
    is_text = next(iter(panel.groups.values())).first.is_text
    names = ["log avg\nPPL" if is_text else "CER", *MEASURES]
    angles = numpy.linspace(0, 2 * numpy.pi, len(names), endpoint=False)
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    values = []
    for group in panel.groups.values():
        anytime = group.complete.anytime
        # Zero stands for a perfect model on both.
        means = [(numpy.log(anytime) if is_text else anytime).mean()]
        values.append([*means, *(group.complete[column].mean() for column in MEASURES.values())])
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


def _caption(is_text: bool, is_without_replay: bool) -> str:
    result = "the logarithm of the average test perplexity" if is_text else "cumulative error rate (CER)"
    words = (
        f"Four costs of each learner over the stream: {result}, memory (Mem: parameters summed over arrivals), "
        "training compute, and compute of a prediction summed over arrivals. Each axis goes from 0 to the largest "
        "value in its panel, so panels do not compare; rings stand at quarters, nearer to the centre is better. "
        "Complete runs, means over seeds."
    )
    return words + (" Without replay." if is_without_replay else "")
