"""A table of a report: cells as people read them, with what stands behind them, as Markdown, CSV and LaTeX."""

import math
import re
import textwrap
from dataclasses import dataclass
from typing import Any, Callable, Collection, Iterable, NamedTuple, Optional, Sequence, Union

from pandas import DataFrame

from fairseq_alma.report.finding import Spread
from fairseq_alma.report.spelling import NOT_YET, show_number

WIDTH = 120
LATEX_MARKS = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "±": r"$\pm$", "–": "--", "…": r"\dots{}", "×": r"$\times$", "→": r"$\to$", "*": r"$\ast$", "|": r"$|$",
    "θ": r"$\theta$",
}  # fmt: skip


class Cell(NamedTuple):
    """One cell: as it is read, what it is sorted by and marked as best by, whether it is the smallest of its column."""

    text: str
    value: Union[str, int, float, Spread, None] = None
    is_best: bool = False

    @property
    def is_name(self) -> bool:
        """Whether the cell holds a name rather than a number."""
        return isinstance(self.value, str)

    @property
    def number(self) -> Optional[float]:
        """The number behind the cell, or None."""
        value = self.value.mean if isinstance(self.value, Spread) else self.value
        return None if value is None or isinstance(value, str) or math.isnan(value) else float(value)


UNKNOWN = Spread(math.nan, math.nan)
NOTHING = Cell(NOT_YET)


def count_cell(text: str, value: float) -> Cell:
    """Return a cell that holds a whole number, or NaN."""
    return Cell(text, value if math.isnan(value) else int(value))


def number_cell(value: Optional[float], digits: int) -> Cell:
    """Return a cell that shows so many decimals of a number; None: the learner is waiting."""
    return Cell(show_number(value, digits), value)


def spread_cell(spread: Optional[Spread], show: Callable[[Spread], str], missing: str = NOT_YET) -> Cell:
    """Return a cell that shows mean and deviation over seeds in some way, or a text where there are none."""
    return Cell(missing, UNKNOWN) if spread is None else Cell(show(spread), spread)


def interval_cell(gap: Optional[Spread]) -> Cell:
    """Return a cell with the mean of a difference over seeds and half the width of its interval, where it has one."""
    return NOTHING if gap is None else Cell(gap.show_interval(), gap)


def _as_cell(cell: Union[Cell, str]) -> Cell:
    return Cell(cell, cell) if isinstance(cell, str) else cell


@dataclass(frozen=True, eq=False)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: what it shows.
        notes: what the columns mean, one paragraph.
        cells: a `Cell` in each place, or a name; the names of the columns are the header.
        hidden: columns that only programs get.
        plain: the cells for programs, where they are others.
        mean: how programs find the mean of a column with deviations; the deviation has a column of its own.
    """

    name: str
    title: str
    notes: str
    cells: DataFrame
    hidden: Collection[str] = ()
    plain: Optional[DataFrame] = None
    mean: str = "{}"

    @property
    def header(self) -> list[str]:
        """Names of the columns that people are shown."""
        return [title for title in self.cells.columns if title not in self.hidden]

    @property
    def rows(self) -> list[list[Cell]]:
        """The cells that people are shown."""
        shown = self.cells[self.header].to_numpy().tolist() if len(self.cells) else []
        return [list(map(_as_cell, row)) for row in shown]

    def markdown(self) -> str:
        """Return the table as Markdown, the best values in bold, and its notes."""
        return f"{render_markdown(self.header, self.rows)}\n{textwrap.fill(self.notes, WIDTH)}\n"

    def latex(self) -> str:
        """Return the table as a LaTeX ``tabular`` for the package booktabs, the best values in bold."""
        rows = [[rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, _, best in row] for row in self.rows]
        is_left = [all(cell.is_name for cell in self.rows[0][: place + 1]) for place in range(len(self.header))]
        columns = "".join("l" if left else "r" for left in is_left)
        shown = DataFrame(rows, columns=[_latex(title) for title in self.header])
        return shown.to_latex(index=False, escape=False, column_format=columns)

    def csv(self) -> str:
        """Return the table as CSV, numbers in full; a missing value is an empty cell."""
        columns: dict[str, list[Any]] = {}
        for title, cells in (self.cells if self.plain is None else self.plain).items():
            values: list[Any] = [_as_cell(cell).value for cell in cells]
            if any(isinstance(value, Spread) for value in values):
                spreads = [UNKNOWN if value is None else value for value in values]
                columns[self.mean.format(title)] = [spread.mean for spread in spreads]
                columns[f"{title} deviation"] = [spread.deviation for spread in spreads]
            else:
                columns[str(title)] = [inert(value) if isinstance(value, str) else value for value in values]
        return DataFrame(columns, dtype=object).to_csv(index=False, lineterminator="\n")


def inert(text: str) -> str:
    """Keep a name from being read as a formula by a spreadsheet."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def mark_best(rows: Sequence[dict[str, Cell]], titles: Iterable[str]) -> None:
    """Mark the smallest number of each of these columns, where there are at least two; also those spelled the same."""
    for title in titles:
        numbers = [(number, row[title].text) for row in rows if (number := row[title].number) is not None]
        for row in rows if len(numbers) > 1 else ():
            row[title] = row[title]._replace(is_best=row[title].text == min(numbers)[1])


def render_markdown(header: Sequence[str], rows: Iterable[Sequence[Union[Cell, str]]]) -> str:
    """Return an aligned Markdown table: the first column to the left, all others to the right."""
    cells = [list(map(_as_cell, row)) for row in rows]
    shown = [header, *([f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in cells)]
    lines = [[text.replace("|", "\\|") for text in line] for line in shown]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:])] for line in lines]
    rules = ["-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths)]
    head, *body = [f"| {' | '.join(line)} |\n" for line in padded]
    return f"{head}|{'|'.join(rules)}|\n{''.join(body)}"


def _latex(text: str) -> str:
    """Escape what LaTeX reads as a command, and set powers of ten as such."""
    escaped = "".join(LATEX_MARKS.get(mark, mark) for mark in text)
    return re.sub(r"([\d.]+)e\+?(-?)0*(\d+)", r"$\1\\times 10^{\2\3}$", escaped)
