"""A table with cells for people and for programs, as Markdown, CSV and LaTeX."""

import csv
import io
import math
import re
from dataclasses import dataclass
from typing import Collection, Mapping, Optional, Sequence, Union

from fairseq_alma.report.experiment import Spread

WAITING, NOT_YET = "*", "–"
LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "±": r"$\pm$", "–": "--", "*": r"$\ast$", "|": r"$|$",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One cell: text for people, its number and the deviation over seeds (None: a name, or no value)."""

    text: str
    number: Optional[float] = None
    deviation: Optional[float] = None


Row = dict[str, Union[Cell, str]]
NOTHING = Cell(NOT_YET)


def number(value: float, digits: int) -> Cell:
    """Return a cell with that many decimals; a dash for NaN."""
    return NOTHING if math.isnan(value) else Cell(f"{value:,.{digits}f}", value)


def count(value: float) -> Cell:
    """Return a cell with a large count in three digits: ``65.4M``; a dash for NaN."""
    return NOTHING if math.isnan(value) else Cell(show_count(value), value)


def spread(value: Optional[Spread], digits: int, missing: str = NOT_YET) -> Cell:
    """Return a cell with mean and deviation over seeds, or ``missing`` if there is none."""
    if value is None:
        return Cell(missing)
    return Cell(value.show(digits), value.mean, None if math.isnan(value.deviation) else value.deviation)


def show_count(value: float) -> str:
    """Format a large count in three digits: ``65.4M``; from a thousand tera on ``3.62e+15``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= value < 1e15:
            digits = value / limit
            return f"{digits:.3g}{unit}" if digits < 999.5 else f"{digits:,.0f}{unit}"
    return f"{value:.2e}" if value >= 1e15 else f"{value:g}"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: what it shows.
        notes: what the columns mean, in one paragraph.
        rows: by the titles of the columns, the same in all rows.
        best: titles of the columns whose smallest number is marked.
        hidden: titles of the columns that only the CSV file has.
        unranked: indices of rows that are never marked.
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
        """Titles of the columns that people see."""
        return [title for title in self.rows[0] if title not in self.hidden]

    def body(self) -> list[list[tuple[str, bool]]]:
        """Return text of each cell and whether it is the best of its column."""
        lowest = {title: self._lowest(title) for title in self.best}
        return [
            [
                (_text(row[title]), index not in self.unranked and lowest.get(title) == _number(row[title]) is not None)
                for title in self.header
            ]
            for index, row in enumerate(self.rows)
        ]

    def _lowest(self, title: str) -> Optional[float]:
        """Return the smallest number of a column, or None unless there are at least two."""
        ranked = [_number(row[title]) for index, row in enumerate(self.rows) if index not in self.unranked]
        known = [value for value in ranked if value is not None and math.isfinite(value)]
        return min(known) if len(known) > 1 else None

    def markdown(self) -> str:
        """Return title, table and notes."""
        cells = [[f"**{text}**" if best else text.replace("|", "\\|") for text, best in row] for row in self.body()]
        lines = [self.header, *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        names = [isinstance(self.rows[0][title], str) for title in self.header]
        padded = [
            [
                text.ljust(width) if name else text.rjust(width)
                for text, width, name in zip(line, widths, names, strict=True)
            ]
            for line in lines
        ]
        rule = ["-" * (width + 1) + ("-" if name else ":") for width, name in zip(widths, names, strict=True)]
        head, *rest = [f"| {' | '.join(line)} |" for line in padded]
        return "\n".join([f"**{self.title}**", "", head, f"|{'|'.join(rule)}|", *rest, "", self.notes, ""])

    def csv(self) -> str:
        """Return the numbers with all digits; a column with deviations is followed by one of these."""
        deviating = [title for title in self.rows[0] if any(_deviation(row[title]) is not None for row in self.rows)]
        titles = [
            each for title in self.rows[0] for each in ((title, f"{title} std") if title in deviating else (title,))
        ]
        out = io.StringIO()
        writer = csv.DictWriter(out, titles, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            numbers = {title: cell if isinstance(cell, str) else cell.number for title, cell in row.items()}
            writer.writerow(numbers | {f"{title} std": _deviation(row[title]) for title in deviating})
        return out.getvalue()

    def latex(self) -> str:
        """Return a ``tabular`` for the package booktabs."""
        columns = "".join("l" if isinstance(self.rows[0][title], str) else "r" for title in self.header)
        body = [
            " & ".join(f"\\textbf{{{_latex(text)}}}" if best else _latex(text) for text, best in row) + r" \\"
            for row in self.body()
        ]
        head = " & ".join(map(_latex, self.header)) + r" \\"
        lines = [
            f"% {self.title}",
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
        ]
        return "\n".join([*lines, r"\end{tabular}", ""])


def _text(cell: Union[Cell, str]) -> str:
    return cell if isinstance(cell, str) else cell.text


def _number(cell: Union[Cell, str]) -> Optional[float]:
    return None if isinstance(cell, str) else cell.number


def _deviation(cell: Union[Cell, str]) -> Optional[float]:
    return None if isinstance(cell, str) else cell.deviation


def _latex(text: str) -> str:
    escaped = "".join(LATEX.get(mark, mark) for mark in text)
    return re.sub(r"([\d.]+)e\+?(-?)0*(\d+)", r"$\1\\times 10^{\2\3}$", escaped)


def filled(rows: Sequence[Row]) -> list[Row]:
    """Give all rows the same columns, in the order in which they first appear."""
    titles: Mapping[str, None] = dict.fromkeys(title for row in rows for title in row)
    return [{title: row.get(title, NOTHING) for title in titles} for row in rows]
