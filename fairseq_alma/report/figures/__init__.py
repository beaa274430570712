"""The paper's figures over any set of runs. Importing this package does not import matplotlib."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.experiment import begun
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.terminal import tell


@dataclass(frozen=True)
class FigureFile:
    """A figure as files: name without endings, title, caption of one paragraph; path by ending (png, pdf, svg)."""

    name: str
    title: str
    caption: str
    files: Mapping[str, Path]


def draw_all(runs: RunTable, out: Path, paper: bool = False) -> list[FigureFile]:
    """Draw what the runs allow, text and images, finished or not, into a folder; what they do not allow is left out.

    Runs on different streams get figures of their own, under names that end with a number. A figure that cannot be
    drawn because a file of a run is damaged is named on standard error; the others are drawn. ``paper``: draw the
    paper's own results beside those of the runs, where a figure has a place for them.

    Raises:
        AlmaError: matplotlib is not installed.
    """
    try:
        from fairseq_alma.report.figures import curves, maps, trade_off
        from fairseq_alma.report.figures.style import applied, save
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise AlmaError(
            "figures: matplotlib is not installed; pip install 'fairseq-alma[report]' brings it, and the same command "
            "then draws them"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    streams, files = runs.by("stream_key") if len(runs.facts) else [], []
    draws = [curves.draw_curves, trade_off.draw_trade_off, trade_off.draw_experts, trade_off.draw_replay]
    draws += [curves.draw_radar, maps.draw_matrix, maps.draw_usage, maps.draw]
    with applied():
        for number, same in enumerate(streams, 1):
            groups, stream = begun(same), next(same.facts.itertuples()).stream
            ending, where = "", ""
            if len(streams) > 1:
                ending, where = f"-{number}", f": {stream.get('dataset') or Path(str(stream['path'])).name}"
            for draw in draws:
                try:
                    drawings = draw(same, groups, paper)
                except AlmaError as error:
                    tell(str(error), sys.stderr)
                    continue
                for drawing in drawings:
                    name = f"{drawing.name}{ending}"
                    paths = save(drawing.figure, out / name)
                    files.append(FigureFile(name, f"{drawing.title}{where}", drawing.caption, paths))
    return files
