"""Average perplexity against the number of experts (Figure 5 of the paper, right). Language only, as there."""

from typing import Sequence

from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from fairseq_alma.report.figures import paper_runs, style
from fairseq_alma.report.figures.cost_panels import CostPanels
from fairseq_alma.report.figures.number_axes import linear
from fairseq_alma.report.figures.run_groups import RunGroup, anytime_label, by_size, complete_groups
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.figures.traces import Look, write_legend
from fairseq_alma.report.figures.trajectory import trajectory
from fairseq_alma.report.run_figures import RunFigures

NAME = "experts"
TITLE = "Perplexity against the number of experts"


def draw(runs: Sequence[RunFigures], paper: bool = False) -> list[Drawing]:
    """Draw complete runs on text over their experts, without replay; nothing where all have equally many.

    Args:
        runs: on one stream.
        paper: draw the paper's results below.
    """
    groups = [group for group in complete_groups(runs) if group.first.is_text and not group.first.replay]
    if len({point.experts for group in groups for point in trajectory(group)}) < 2:
        return []
    parts = [("", groups)]
    if paper:
        parts.append((paper_runs.TITLE, complete_groups(paper_runs.paper_runs())))
    figure = style.new_figure(4.6, 3.2 * len(parts))
    looks = [
        _draw_part(part, title, shown)
        for part, (title, shown) in zip(figure.subfigures(len(parts), 1, squeeze=False)[:, 0], parts, strict=True)
    ]
    write_legend(figure, looks, [shown for _, shown in parts])
    return [Drawing(NAME, TITLE, _caption(groups) + (paper_runs.CAPTION if paper else ""), figure)]


def _draw_part(figure: FigureBase, title: str, groups: Sequence[RunGroup]) -> Look:
    """Draw one panel and return how the groups look in it."""
    ways = [(group, trajectory(group)) for group in groups]
    results = [point.average for _, way in ways for point in way]
    results += [end for group in groups for end in group.bar]
    panels = CostPanels(figure, results, 1, anytime_label(groups[0].first))
    look = Look.of(groups, by_size(groups))
    for group, way in ways:
        experts, averages = [point.experts for point in way], [point.average for point in way]
        for axes in panels.axes_of(0):
            look.line(axes, experts, averages, group)
            look.dots(axes, experts, averages, group)
            look.mark(axes, experts[-1], averages[-1], group.anytime[1], group)
    bottom = panels.lower(0)
    linear(bottom.xaxis, [point.experts for _, way in ways for point in way])
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    bottom.set_xlabel("experts in a layer, over all models that predict together")
    panels.upper(0).set_title(title, loc="left")
    return look


def _caption(groups: Sequence[RunGroup]) -> str:
    words = [
        "Average test perplexity over the arrivals so far against the experts in each layer, counted over all models "
        "that predict together. Each line is a learner's way through the stream, the marker its end; a learner that "
        "does not grow goes straight down."
    ]
    if any(len(group.experiment.complete) > 1 for group in groups):
        words.append("Mean over seeds, bars: standard deviation.")
    return " ".join(words)
