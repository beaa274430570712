"""A table of a report: cells as people read them, with what stands behind them, as Markdown, CSV and LaTeX.

Markdown and LaTeX are written here, as pandas' own need packages for it and know neither bold cells nor our marks.
"""

import math
import re
import textwrap
from dataclasses import dataclass
from typing import Any, Collection, Iterable, NamedTuple, Optional, Sequence, Union

from pandas import DataFrame

from fairseq_alma.report.spelling import NOT_YET, show_number
from fairseq_alma.report.spread import Spread

Value = Union[str, int, float, Spread, None]
WIDTH = 120
LATEX_MARKS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
    "…": r"\dots{}",
    "×": r"$\times$",
    "→": r"$\to$",
    "*": r"$\ast$",
    "|": r"$|$",
    "θ": r"$\theta$",
}


class Cell(NamedTuple):
    """One cell: as it is read, what it is sorted by and marked as best by, whether it is the smallest of its column."""

    text: str
    value: Value = None
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


NOTHING = Cell(NOT_YET)
NO_SPREAD = Cell(NOT_YET, Spread(math.nan, math.nan))


def count_cell(text: str, value: float) -> Cell:
    """Return a cell that holds a whole number, or NaN."""
    return Cell(text, value if math.isnan(value) else int(value))


def number_cell(value: Optional[float], digits: int) -> Cell:
    """Return a cell that shows so many decimals of a number; None: the learner is waiting."""
    return Cell(show_number(value, digits), value)


def _as_cell(cell: Union[Cell, str]) -> Cell:
    return Cell(cell, cell) if isinstance(cell, str) else cell


@dataclass(frozen=True, eq=False)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: what it shows.
        cells: a `Cell` in each place, or a name; the names of the columns are the header.
        notes: what the columns mean, one paragraph.
        num_names: columns at the left that hold names rather than numbers.
        hidden: columns that only programs get.
        plain: the cells for programs, where they are others.
        mean: how programs find the mean of a column with deviations; the deviation has a column of its own.
    """

    name: str
    title: str
    cells: DataFrame
    notes: str
    num_names: int = 1
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
        return (
            [list(map(_as_cell, row)) for row in self.cells[self.header].to_numpy().tolist()] if len(self.cells) else []
        )

    def markdown(self) -> str:
        """Return the table as Markdown, the best values in bold, and its notes."""
        return f"{render_markdown(self.header, self.rows)}\n{textwrap.fill(self.notes, WIDTH)}\n"

    def latex(self) -> str:
        """Return the table as a LaTeX ``tabular`` for the package booktabs, the best values in bold."""
        return render_latex(self.header, self.rows, self.num_names)

    def csv(self) -> str:
        """Return the table as CSV, numbers in full; a missing value is an empty cell."""
        columns: dict[str, list[Any]] = {}
        for title, cells in (self.cells if self.plain is None else self.plain).items():
            values: list[Any] = [_as_cell(cell).value for cell in cells]
            if any(isinstance(value, Spread) for value in values):
                spreads = [NO_SPREAD.value if value is None else value for value in values]
                columns[self.mean.format(title)] = [spread.mean for spread in spreads]
                columns[f"{title} deviation"] = [spread.deviation for spread in spreads]
            else:
                columns[title] = [inert(value) if isinstance(value, str) else value for value in values]
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


def render_markdown(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return an aligned Markdown table: the first column to the left, all others to the right."""
    shown = [[f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in rows]
    lines = [[text.replace("|", "\\|") for text in line] for line in (header, *shown)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |\n"

    rules = ["-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths)]
    return line(lines[0]) + f"|{'|'.join(rules)}|\n" + "".join(map(line, lines[1:]))


def render_latex(header: Sequence[str], rows: Sequence[Sequence[Cell]], num_left: int = 1) -> str:
    """Return a table as a LaTeX ``tabular`` with the rules of booktabs, the columns after ``num_left`` to the right."""
    shown = [[rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, _, best in row] for row in rows]
    lines = [" & ".join(line) + r" \\" for line in ([_latex(title) for title in header], *shown)]
    columns = "l" * num_left + "r" * (len(header) - num_left)
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*begin, *lines[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    """Escape what LaTeX reads as a command, and set powers of ten as such."""
    escaped = "".join(LATEX_MARKS.get(mark, mark) for mark in text)
    return re.sub(r"([\d.]+)e\+?(-?)0*(\d+)", r"$\1\\times 10^{\2\3}$", escaped)
