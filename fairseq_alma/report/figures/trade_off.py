"""Result against cost, the number of experts, and the effect of replay (Figures 2, 4, 5, 7 and 8 of the paper)."""

from typing import Any, Callable, Mapping, Sequence

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_alma.report import paper as paper_numbers
from fairseq_alma.report.experiment import Experiment, begun, by_size, completed, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.costs import Look, Trace, grid, write_labels, write_legend
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import show_count

MOST_COLUMNS = 3
CROWDED = 12  # pairs with and without replay in one panel
SEEDS = "Mean over seeds, bars: standard deviation."
TracesOf = Callable[[Sequence[Experiment]], list[Trace]]
Columns = Mapping[str, Callable[[Axis, Sequence[float]], None]]  # of costs: label, and what scales the axis


def draw_trade_off(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw average perplexity or CER of complete runs against compute and size (Figures 2, 5 and 7).

    Text, as in Figure 5: each line is a learner's way through the stream, from the first update to the last arrival.
    Images, as in Figures 2 and 7: a marker for the whole stream, a line through the sizes of one learner.
    """
    complete = completed(groups)
    shown = [group for group in complete if not group.first.replay] or complete
    if not shown:
        return []
    is_text = shown[0].first.is_text
    columns: Columns = {
        "cumulative training compute (TFLOPs)": _scale_tflops,
        "parameters" if is_text else "cumulative parameters": _scale_counts,
    }
    parts = _parts(shown, paper and is_text)
    figure = _draw_parts(style.FULL_WIDTH, 3.3, parts, _text_traces if is_text else _image_traces, columns)
    caption = _trade_off_caption(shown, runs.facts) + (paper_numbers.FIGURE_CAPTION if len(parts) > 1 else "")
    return [Drawing("trade-off", "Trade-off of result, compute and size", caption, figure)]


def _scale_tflops(axis: Axis, costs: Sequence[float]) -> None:
    style.logarithmic(axis, costs, style.show_tflops(costs))


def _scale_counts(axis: Axis, costs: Sequence[float]) -> None:
    style.logarithmic(axis, costs, show_count)


def _parts(groups: Sequence[Experiment], paper: bool) -> dict[str, Sequence[Experiment]]:
    """Return what is drawn above each other: the runs, and the paper's results where they are asked for."""
    theirs = {paper_numbers.FIGURE_TITLE: completed(begun(paper_numbers.paper_runs()))} if paper else {}
    return {"": groups, **theirs}


def _draw_parts(
    width: float, height: float, parts: Mapping[str, Sequence[Experiment]], traces_of: TracesOf, columns: Columns
) -> Figure:
    """Draw parts of a figure below each other, a panel for each column of costs; size in inches, of each part."""
    figure, looks = style.new_figure(width, height * len(parts)), []
    for part, (title, groups) in zip(figure.subfigures(len(parts), 1, squeeze=False)[:, 0], parts.items(), strict=True):
        traces, look = traces_of(groups), Look(groups, by_size(groups) if groups[0].first.is_text else ())
        axes = grid(part, groups, traces, len(columns))
        for column, (label, scale) in enumerate(columns.items()):
            scale(axes[-1, column].xaxis, [cost for trace in traces for cost in trace.costs[column]])
            for trace in traces:
                look.draw(axes[:, column], trace, column)
            axes[-1, column].set_xlabel(label)
            write_labels(axes[:, column], traces, column)
        axes[0, 0].set_title(title, loc="left")
        looks.append(look)
    write_legend(figure, looks, parts.values())
    return figure


def _text_traces(groups: Sequence[Experiment]) -> list[Trace]:
    traces = []
    for size in by_size(groups).values():
        for group, name in zip(size, names_of(size), strict=True):
            label = name.removeprefix(group.label).removeprefix(", ").removesuffix(" experts")
            traces.append(Trace.way(group, ["tflops", "params"], label))
    return traces


def _image_traces(groups: Sequence[Experiment]) -> list[Trace]:
    """Return for each learner, waiting time and variant its sizes."""
    kin: dict[str, list[Experiment]] = {}
    for same in by_size(groups).values():
        for group, name in zip(same, names_of(same), strict=True):
            kin.setdefault(name, []).append(group)
    return [Trace.through(sizes) for sizes in kin.values()]


def _trade_off_caption(groups: Sequence[Experiment], facts: Any) -> str:
    if groups[0].first.is_text:
        words = [
            "Average test perplexity over the arrivals so far against training compute so far and against the "
            "parameters of what predicts. Each line is a learner's way through the stream, a dot for each arrival "
            "from its first update on, the marker at the end; numbers are experts."
        ]
    else:
        words = [
            "Cumulative error rate over the whole stream against training compute and parameters, both summed over "
            "all arrivals. Lines join the sizes of one learner's backbone."
        ]
    words.append("Down and to the left is better; 1 TFLOP is 10^12 operations.")
    words += [SEEDS] if _has_seeds(groups) else []
    words += ["Without replay."] if not groups[0].first.replay and facts.replay.any() else []
    missing = len(facts) - facts.is_complete.sum()
    words += [f"{missing} run{'s that are' if missing > 1 else ' that is'} not complete left out."] if missing else []
    return " ".join(words)


def draw_experts(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw average perplexity against the number of experts (Figure 5, right). Language only, as there.

    Complete runs without replay; nothing where all have equally many experts.
    """
    shown = [group for group in completed(groups) if group.first.is_text and not group.first.replay]
    if len({count for group in shown for count in Trace.way(group, ["experts"]).costs[0]}) < 2:
        return []

    def scale(axis: Axis, costs: Sequence[float]) -> None:
        style.linear(axis, costs)
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))

    columns: Columns = {"experts in a layer, over all models that predict together": scale}
    figure = _draw_parts(
        4.6, 3.2, _parts(shown, paper), lambda each: [Trace.way(x, ["experts"]) for x in each], columns
    )
    caption = (
        "Average test perplexity over the arrivals so far against the experts in each layer, counted over all models "
        "that predict together. Each line is a learner's way through the stream, the marker its end; a learner that "
        "does not grow goes straight down."
    )
    caption += (f" {SEEDS}" if _has_seeds(shown) else "") + (paper_numbers.FIGURE_CAPTION if paper else "")
    return [Drawing("experts", "Perplexity against the number of experts", caption, figure)]


def draw_replay(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw a segment from each learner without replay to the same learner with it (Figures 4 and 8).

    Complete runs that are alike but for replay; nothing where there are none.
    """
    pairs = replay_pairs(completed(groups))
    if not pairs:
        return []
    # Each learner has a panel of its own, as in Figure 8, where one panel would be crowded.
    columns: dict[str, list[Trace]] = {}
    for pair in pairs:
        columns.setdefault(pair[0].first.name if len(pairs) > CROWDED else "", []).append(Trace.through(pair))
    num_rows = -(-len(columns) // MOST_COLUMNS)
    num_columns = -(-len(columns) // num_rows)
    both = [group for pair in pairs for group in pair]
    look, costs = Look(both), [cost for traces in columns.values() for trace in traces for cost in trace.costs[0]]
    width = 4.6 if num_columns == 1 else 1.2 + 1.95 * num_columns
    figure = style.new_figure(width, 3.2 if num_rows == 1 and num_columns < 3 else 0.4 + 2.1 * num_rows)
    panels = list(columns.items())
    for row, part in enumerate(figure.subfigures(num_rows, 1, squeeze=False)[:, 0]):
        axes = grid(part, both, [], num_columns)
        for column in range(num_columns):
            place = row * num_columns + column
            if place >= len(panels):
                for each in axes[:, column]:
                    each.set_axis_off()
                continue
            for trace in panels[place][1]:
                look.draw(axes[:, column], trace, 0)
            _scale_tflops(axes[-1, column].xaxis, costs)
            axes[0, column].set_title(panels[place][0])
            if place + num_columns >= len(panels):
                axes[-1, column].set_xlabel("training TFLOPs")
    write_legend(figure, [look], [both])
    value = "Average test perplexity" if both[0].first.is_text else "Cumulative error rate"
    caption = (
        f"{value} against all training compute (1 TFLOP is 10^12 operations). Each segment goes from a learner without "
        "replay (filled) to the same learner trained on everything that has arrived so far (hollow)."
    ) + (f" {SEEDS}" if _has_seeds(both) else "")
    return [Drawing("replay", "Effect of replay", caption, figure)]


def replay_pairs(groups: Sequence[Experiment]) -> list[tuple[Experiment, Experiment]]:
    """Find experiments that are alike but for replay; the one without comes first."""
    without = {group.settings_but("replay"): group for group in groups if not group.first.replay}
    pairs = [(without.get(group.settings_but("replay")), group) for group in groups if group.first.replay]
    return [(one, other) for one, other in pairs if one is not None]


def _has_seeds(groups: Sequence[Experiment]) -> bool:
    return any(len(group.complete) > 1 for group in groups)
