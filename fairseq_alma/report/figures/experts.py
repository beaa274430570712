"""Average perplexity against the number of experts (Figure 5 of the paper, right). Language only, as there."""

from typing import Sequence

from matplotlib.ticker import MaxNLocator

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.cost_panels import CostPanels
from fairseq_alma.report.figures.number_axes import linear
from fairseq_alma.report.figures.run_groups import RunGroup, anytime_label, by_size, complete_groups
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.figures.traces import Look
from fairseq_alma.report.figures.trajectory import trajectory
from fairseq_alma.report.run_figures import RunFigures

NAME = "experts"
TITLE = "Perplexity against the number of experts"


def draw(runs: Sequence[RunFigures]) -> list[Drawing]:
    """Draw complete runs on text over their experts, without replay; nothing where all have equally many."""
    groups = [group for group in complete_groups(runs) if group.first.is_text and not group.first.replay]
    points = {id(group): trajectory(group) for group in groups}
    numbers = {point.experts for way in points.values() for point in way}
    if len(numbers) < 2:
        return []
    figure = style.new_figure(4.6, 3.2)
    panels = CostPanels(figure, [point.average for way in points.values() for point in way], 1, anytime_label(runs[0]))
    look = Look.of(groups, by_size(groups))
    for group in groups:
        experts = [point.experts for point in points[id(group)]]
        averages = [point.average for point in points[id(group)]]
        for axes in panels.axes_of(0):
            look.line(axes, experts, averages, group)
            look.dots(axes, experts, averages, group)
            look.mark(axes, experts[-1], averages[-1], group.anytime[1], group)
    bottom = panels.lower(0)
    linear(bottom.xaxis, sorted(numbers))
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    bottom.set_xlabel("experts in a layer, over all models that predict together")
    look.legend(figure, groups)
    return [Drawing(NAME, TITLE, _caption(groups), figure)]


def _caption(groups: Sequence[RunGroup]) -> str:
    words = [
        "Average test perplexity over the arrivals so far against the experts in each layer, counted over all models "
        "that predict together. Each line is a learner's way through the stream, the marker its end; a learner that "
        "does not grow goes straight down."
    ]
    if any(len(group.experiment.complete) > 1 for group in groups):
        words.append("Mean over seeds, bars: standard deviation.")
    return " ".join(words)
