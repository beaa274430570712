"""Which figures there are, and for which runs each of them is drawn."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures import anytime_curve, expert_map, expert_usage, experts, radar, replay, trade_off
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.run_figures import RunFigures, experiment_of

Draw = Callable[[Sequence[RunFigures]], list[Drawing]]


def drawings(runs: Sequence[RunFigures], paper: bool, complain: Callable[[AlmaError], None]) -> Iterator[Drawing]:
    """Draw what the runs allow, one figure after the other.

    Args:
        runs: on any streams; what does not compare is drawn apart, under names that end with a number.
        paper: draw the paper's results where a figure has a place for them.
        complain: is given what kept a figure from being drawn.
    """
    streams: dict[str, list[RunFigures]] = {}
    for run in runs:
        streams.setdefault(json.dumps([run.kind, experiment_of(run.stream)]), []).append(run)
    for number, same in enumerate(streams.values(), 1):
        for draw in _figures(paper):
            try:
                found = draw(same)
            except AlmaError as error:
                complain(error)
                continue
            yield from (_name(drawing, same[0], number) if len(streams) > 1 else drawing for drawing in found)


def _figures(paper: bool) -> list[Draw]:
    return [
        anytime_curve.draw,
        partial(trade_off.draw, paper=paper),
        partial(experts.draw, paper=paper),
        replay.draw,
        radar.draw,
        expert_usage.draw,
        expert_map.draw,
    ]


def _name(drawing: Drawing, run: RunFigures, number: int) -> Drawing:
    """Tell the same figure over several streams apart."""
    stream = str(run.stream.get("dataset") or Path(str(run.stream["path"])).name)
    return replace(drawing, name=f"{drawing.name}-{number}", title=f"{drawing.title}: {stream}")
