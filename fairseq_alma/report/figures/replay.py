"""The effect of replay: a segment from each learner without to the same learner with it (Figures 4 and 8)."""

import json
import statistics
from dataclasses import dataclass
from typing import Sequence

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.cost_panels import CostPanels
from fairseq_alma.report.figures.number_axes import logarithmic, show_tflops
from fairseq_alma.report.figures.run_groups import RunGroup, anytime_label, complete_groups
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.figures.traces import Look, write_legend
from fairseq_alma.report.figures.trajectory import TERA
from fairseq_alma.report.run_figures import RunFigures

NAME = "replay"
TITLE = "Effect of replay"
MOST_COLUMNS = 3
CROWDED = 12


@dataclass(frozen=True)
class Pair:
    """Runs that are alike but for replay."""

    without: RunGroup
    replayed: RunGroup


def draw(runs: Sequence[RunFigures]) -> list[Drawing]:
    """Draw a segment for each pair of complete runs that are alike but for replay; nothing where there is none."""
    pairs = pairs_of(complete_groups(runs))
    if not pairs:
        return []
    columns = _columns(pairs)
    num_rows = -(-len(columns) // MOST_COLUMNS)
    num_columns = -(-len(columns) // num_rows)
    groups = [group for pair in pairs for group in (pair.without, pair.replayed)]
    look = Look.of(groups)
    width = 4.6 if num_columns == 1 else 1.2 + 1.95 * num_columns
    figure = style.new_figure(width, 3.2 if num_rows == 1 and num_columns < 3 else 0.4 + 2.1 * num_rows)
    results = [end for group in groups for end in group.bar]
    costs = [_tflops(group) for group in groups]
    for row, part in enumerate(figure.subfigures(num_rows, 1, squeeze=False)[:, 0]):
        shown = list(columns.items())[row * num_columns : (row + 1) * num_columns]
        panels = CostPanels(part, results, num_columns, anytime_label(runs[0]))
        for column in range(num_columns):
            if column >= len(shown):
                panels.hide(column)
                continue
            name, same = shown[column]
            for pair in same:
                _draw_pair(panels, column, pair, look)
            logarithmic(panels.lower(column).xaxis, costs, show_tflops(costs))
            panels.upper(column).set_title(name)
            if row == num_rows - 1 or column >= len(columns) - (row + 1) * num_columns:
                panels.lower(column).set_xlabel("training TFLOPs")
    write_legend(figure, [look], [groups])
    return [Drawing(NAME, TITLE, _caption(pairs), figure)]


def pairs_of(groups: Sequence[RunGroup]) -> list[Pair]:
    """Find runs that are alike but for replay."""
    without = {_but_replay(group): group for group in groups if not group.first.replay}
    return [
        Pair(without[key], group) for group in groups if group.first.replay and (key := _but_replay(group)) in without
    ]


def _but_replay(group: RunGroup) -> str:
    learner, options, *rest = json.loads(group.first.settings)
    return json.dumps([learner, {**options, "replay": None}, *rest], sort_keys=True)


def _columns(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Give each learner a panel of its own, as Figure 8 does, where one panel would be crowded; else one for all."""
    if len(pairs) <= CROWDED:
        return {"": list(pairs)}
    learners: dict[str, list[Pair]] = {}
    for pair in pairs:
        learners.setdefault(pair.without.first.name, []).append(pair)
    return learners


def _draw_pair(panels: CostPanels, column: int, pair: Pair, look: Look) -> None:
    ends = (pair.without, pair.replayed)
    xs, ys = [_tflops(group) for group in ends], [group.anytime[0] for group in ends]
    for axes in panels.axes_of(column):
        look.line(axes, xs, ys, pair.without)
        for group, x, y in zip(ends, xs, ys, strict=True):
            look.mark(axes, x, y, group.anytime[1], group)


def _tflops(group: RunGroup) -> float:
    return statistics.fmean(run.computation / TERA for run in group.experiment.complete)


def _caption(pairs: Sequence[Pair]) -> str:
    value = "Average test perplexity" if pairs[0].without.first.is_text else "Cumulative error rate"
    words = [
        f"{value} against all training compute (1 TFLOP is 10^12 operations). Each segment goes from a learner without "
        "replay (filled) to the same learner trained on everything that has arrived so far (hollow)."
    ]
    if any(len(group.experiment.complete) > 1 for pair in pairs for group in (pair.without, pair.replayed)):
        words.append("Mean over seeds, bars: standard deviation.")
    return " ".join(words)
