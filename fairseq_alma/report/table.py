"""A table of a report: cells as people read them, with the numbers behind them, as Markdown, CSV and LaTeX."""

import math
import textwrap
from dataclasses import dataclass, field, replace
from typing import Iterable, Optional, Sequence

from fairseq_alma.metrics.table import NOT_YET, Cell, is_missing, render_csv, render_latex, render_markdown

WIDTH = 120


@dataclass(frozen=True)
class TableCell:
    """One cell.

    Attributes:
        text: as it is read.
        value: what it is sorted by, and marked as best by; a number, or the text.
        is_best: whether it is the smallest of its column.
    """

    text: str
    value: Cell = None
    is_best: bool = False

    @property
    def is_name(self) -> bool:
        """Whether the cell holds a name rather than a number."""
        return isinstance(self.value, str)

    @property
    def number(self) -> Optional[float]:
        """The number behind the cell, or None."""
        return None if is_missing(self.value) or isinstance(self.value, str) else float(self.value or 0)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: what it shows.
        header: names of the columns.
        rows: the cells.
        notes: what the columns mean, one paragraph.
        num_names: columns at the left that hold names rather than numbers.
        plain_header: names of the columns of ``plain``; none: those of ``header``.
        plain: the rows for programs, numbers in full; none: the values behind the cells.
    """

    name: str
    title: str
    header: list[str]
    rows: list[list[TableCell]]
    notes: str
    num_names: int = 1
    plain_header: list[str] = field(default_factory=list)
    plain: list[list[Cell]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table as Markdown, the best values in bold, and its notes."""
        rows = [[f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in self.rows]
        return f"{render_markdown(self.header, rows)}\n{textwrap.fill(self.notes, WIDTH)}\n"

    def latex(self) -> str:
        """Return the table as a LaTeX ``tabular`` for the package booktabs, the best values in bold."""
        rows = [[(cell.text, cell.is_best) for cell in row] for row in self.rows]
        return render_latex(self.header, rows, self.num_names)

    def csv(self) -> str:
        """Return the table as CSV, numbers in full."""
        if not self.plain_header:
            return render_csv(self.header, [[cell.value for cell in row] for row in self.rows])
        return render_csv(self.plain_header, self.plain)


def name_cell(text: str) -> TableCell:
    """Return a cell that holds a name."""
    return TableCell(text, text)


def number_cell(text: str, value: Optional[float]) -> TableCell:
    """Return a cell that holds a number."""
    return TableCell(text, math.nan if value is None else value)


NOTHING = TableCell(NOT_YET, math.nan)


def mark_best(
    rows: list[list[TableCell]], columns: Iterable[int], counts: Optional[Sequence[bool]] = None
) -> list[list[TableCell]]:
    """Mark the smallest number of each of these columns, where there are at least two; also those spelled the same.

    Args:
        rows: of the table.
        columns: their numbers.
        counts: for each row whether it takes part; None: all do.
    """
    marked = [list(row) for row in rows]
    taking_part = [row for row, count in zip(marked, counts or [True] * len(rows), strict=True) if count]
    for column in columns:
        numbers = [(number, row[column].text) for row in taking_part if (number := row[column].number) is not None]
        if len(numbers) < 2:
            continue
        _, best = min(numbers)
        for row in taking_part:
            if row[column].text == best:
                row[column] = replace(row[column], is_best=True)
    return marked
