"""Draws every figure that a set of runs allows into files. Imports matplotlib only when it is asked to draw."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.run_figures import RunFigures


@dataclass(frozen=True)
class FigureFile:
    """One figure, as files.

    Attributes:
        name: of the files, without their endings.
        title: a few words.
        caption: what is drawn and how to read it; one paragraph.
        png: for screens and texts, 200 dots per inch.
        pdf: for print, fonts embedded.
        svg: for pages, white background, no fonts needed.
    """

    name: str
    title: str
    caption: str
    png: Path
    pdf: Path
    svg: Path


def draw_all(runs: Sequence[RunFigures], out: Path, paper: bool = False) -> list[FigureFile]:
    """Draw what the runs allow; what they do not allow is left out.

    A figure that cannot be drawn because a file of a run is damaged is named on standard error; the others are drawn.

    Args:
        runs: of any learners, text and images, finished or not. Those on different streams get figures of their own.
        out: folder for the files; made where it is missing.
        paper: draw the paper's own results beside those of the runs, where a figure has a place for them.

    Raises:
        AlmaError: matplotlib is not installed.
    """
    try:
        from fairseq_alma.report.figures.all_figures import drawings
        from fairseq_alma.report.figures.style import applied, save
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise AlmaError(
            "figures: matplotlib is not installed; pip install 'fairseq-alma[report]' brings it, and the same command "
            "then draws them"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    files = []
    with applied():
        for drawing in drawings(runs, paper, complain=lambda error: print(error, file=sys.stderr)):
            png, pdf, svg = save(drawing.figure, out / drawing.name)
            files.append(FigureFile(drawing.name, drawing.title, drawing.caption, png, pdf, svg))
    return files
