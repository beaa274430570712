"""Format tables of text and numbers as Markdown, CSV and LaTeX."""

import math
import re
from dataclasses import dataclass
from typing import Collection, Mapping, Optional, Sequence, Union

from pandas import DataFrame

from fairseq_alma.report.experiment import Spread

WAITING, NOT_YET = "*", "–"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, number, and standard deviation over seeds. A name or a missing value has no number."""

    text: str
    number: Optional[float] = None
    deviation: Optional[float] = None


Row = dict[str, Union[Cell, str]]
NOTHING = Cell(NOT_YET)


def number(value: float, digits: int) -> Cell:
    """Return a cell with a number rounded to ``digits`` decimals, or with a dash for NaN."""
    return NOTHING if math.isnan(value) else Cell(f"{value:,.{digits}f}", value)


def count(value: float) -> Cell:
    """Return a cell with a count to three significant digits, such as ``65.4M``, or with a dash for NaN."""
    return NOTHING if math.isnan(value) else Cell(show_count(value), value)


def spread(value: Optional[Spread], digits: int, missing: str = NOT_YET) -> Cell:
    """Return a cell with mean and standard deviation over seeds, or with the text ``missing`` for None."""
    if value is None:
        return Cell(missing)
    return Cell(value.show(digits), value.mean, None if math.isnan(value.deviation) else value.deviation)


def show_count(value: float) -> str:
    """Format a count to three significant digits, such as ``65.4M``; from 1e15 on, such as ``3.62e+15``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= value < 1e15:
            digits = value / limit
            return f"{digits:.3g}{unit}" if digits < 999.5 else f"{digits:,.0f}{unit}"
    return f"{value:.2e}" if value >= 1e15 else f"{value:g}"


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        name: name of the files of the table, without extension.
        title: title of the table.
        notes: meaning of the columns, in one paragraph.
        rows: rows (column title -> cell); all rows have the same columns.
        best: titles of the columns whose smallest number is bold.
        hidden: titles of the columns that only the CSV file contains.
        unranked: indices of rows that are never bold.
    """

    name: str
    title: str
    notes: str
    rows: Sequence[Row]
    best: Collection[str] = ()
    hidden: Collection[str] = ()
    unranked: Collection[int] = ()

    @property
    def header(self) -> list[str]:
        """Return the titles of the columns that are not hidden."""
        return [title for title in self.rows[0] if title not in self.hidden]

    def body(self) -> list[list[tuple[str, bool]]]:
        """Return (text, whether bold) for each cell in a visible column, row by row.

        In a column in `best`, the smallest number is bold if at least two finite numbers are ranked.
        """
        lowest = {}
        for title in self.best:
            ranked = [_cell(row[title]).number for index, row in enumerate(self.rows) if index not in self.unranked]
            known = [value for value in ranked if value is not None and math.isfinite(value)]
            lowest[title] = min(known) if len(known) > 1 else None
        body = []
        for index, row in enumerate(self.rows):
            ranks = {} if index in self.unranked else lowest
            cells = {title: _cell(row[title]) for title in self.header}
            body.append([(cell.text, ranks.get(title) == cell.number is not None) for title, cell in cells.items()])
        return body

    def markdown(self) -> str:
        """Return title, table and notes in Markdown."""
        cells = [[f"**{text}**" if best else text.replace("|", "\\|") for text, best in row] for row in self.body()]
        lines = [self.header, *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        names = [isinstance(self.rows[0][title], str) for title in self.header]
        formats = [f"{{:{'<' if name else '>'}{width}}}" for width, name in zip(widths, names, strict=True)]
        rule = ["-" * (width + 1) + ("-" if name else ":") for width, name in zip(widths, names, strict=True)]
        head, *rest = [f"| {' | '.join(formats).format(*line)} |" for line in lines]
        return "\n".join([f"**{self.title}**", "", head, f"|{'|'.join(rule)}|", *rest, "", self.notes, ""])

    def csv(self) -> str:
        """Return the table as CSV with unrounded numbers. A column of deviations follows each column of means."""
        columns = {}
        for title in self.rows[0]:
            cells = [row[title] for row in self.rows]
            columns[title] = [each if isinstance(each, str) else each.number for each in cells]
            deviations = [_cell(each).deviation for each in cells]
            if any(each is not None for each in deviations):
                columns[f"{title} std"] = [*deviations]
        return DataFrame(columns, dtype=object).to_csv(index=False, lineterminator="\n")

    def latex(self) -> str:
        """Return a LaTeX ``tabular`` that requires the package booktabs."""
        columns = "".join("l" if isinstance(self.rows[0][title], str) else "r" for title in self.header)
        body = [[f"\\textbf{{{_latex(text)}}}" if best else _latex(text) for text, best in row] for row in self.body()]
        head, *rows = (" & ".join(row) + r" \\" for row in [[*map(_latex, self.header)], *body])
        lines = [f"% {self.title}", f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _cell(cell: Union[Cell, str]) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell


def _latex(text: str) -> str:
    return re.sub(r"[&%$#_{}]", r"\\\g<0>", text).replace("±", r"$\pm$").replace("–", "--")


def filled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the union of the columns of all rows. A dash fills missing cells."""
    titles: Mapping[str, None] = dict.fromkeys(title for row in rows for title in row)
    return [{title: row.get(title, NOTHING) for title in titles} for row in rows]
