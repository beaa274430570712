"""A table as text: Markdown and LaTeX for people, CSV for programs. Knows nothing of what the cells mean."""

import csv
import io
import math
import re
from typing import Optional, Sequence, Union

Cell = Union[str, int, float, None]

WAITING = "*"
NOT_YET = "–"
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


def render_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table: the first column to the left, all others to the right.

    Args:
        header: names of the columns.
        rows: cells as they are to be shown.
    """
    columns = [[title, *(row[index] for row in rows)] for index, title in enumerate(header)]
    widths = [max(3, *(len(cell) for cell in column)) for column in columns]
    lines = [_line(header, widths), "|" + "|".join(_rule(width, index) for index, width in enumerate(widths)) + "|"]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)]) + "\n"


def render_csv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table as CSV, numbers in full; a missing value is an empty cell.

    Args:
        header: names of the columns.
        rows: cells; None and NaN are missing values.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(["" if is_missing(cell) else cell for cell in row])
    return text.getvalue()


def render_latex(header: Sequence[str], rows: Sequence[Sequence[tuple[str, bool]]], num_left: int = 1) -> str:
    """Return a table as a LaTeX ``tabular`` with the rules of the package booktabs.

    Args:
        header: names of the columns.
        rows: cells as they are to be shown, and whether in bold.
        num_left: columns at the left that are aligned there; all others to the right.
    """
    columns = "l" * num_left + "r" * (len(header) - num_left)
    shown = [[rf"\textbf{{{_latex(text)}}}" if bold else _latex(text) for text, bold in row] for row in rows]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_line([_latex(title) for title in header])]
    return "\n".join([*lines, r"\midrule", *map(_latex_line, shown), r"\bottomrule", r"\end{tabular}"]) + "\n"


def is_missing(cell: Cell) -> bool:
    """Tell whether a cell holds no value."""
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def show_number(value: Optional[float], digits: int) -> str:
    """Spell a number with that many decimals; `WAITING` for None, `NOT_YET` for NaN."""
    if value is None:
        return WAITING
    return NOT_YET if math.isnan(value) else f"{value:,.{digits}f}"


def show_count(value: Optional[float]) -> str:
    """Spell a large count in three digits: ``65.4M``."""
    if value is None or math.isnan(value):
        return NOT_YET
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}" if value < 1000 * limit else f"{value / limit:,.0f}{unit}"
    return f"{value:g}"


def show_power(value: float) -> str:
    """Spell a very large number in scientific notation: ``3.62e+11``."""
    return f"{value:.2e}" if value else "0"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    shown[0] = cells[0].ljust(widths[0])
    return "| " + " | ".join(shown) + " |"


def _rule(width: int, index: int) -> str:
    return "-" * (width + 2) if index == 0 else "-" * (width + 1) + ":"


def _latex(text: str) -> str:
    """Escape what LaTeX reads as a command, and set powers of ten as such."""
    escaped = "".join(LATEX_MARKS.get(mark, mark) for mark in text)
    return re.sub(r"([\d.]+)e\+?(-?)0*(\d+)", r"$\1\\times 10^{\2\3}$", escaped)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
