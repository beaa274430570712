"""Writes a whole report into a folder: tables, findings, figures and the page that holds them all."""

import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.atomic_file import open_atomically
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures import FigureFile, draw_all
from fairseq_alma.report.findings import Finding, Verdict, all_findings
from fairseq_alma.report.page import build_page
from fairseq_alma.report.page.facts import stream_name
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.table import Table
from fairseq_alma.report.tables import all_tables

PAGE = "index.html"
FIGURES = "figures"
Findings = Sequence[tuple[RunFigures, Sequence[Finding]]]


class Report:
    """Everything that is said of a set of runs.

    Args:
        runs: at least one.
        paper: set the paper's own numbers beside those of the runs.
    """

    def __init__(self, runs: Sequence[RunFigures], paper: bool = False) -> None:
        self.runs = runs
        self.paper = paper
        self.tables: list[Table] = all_tables(runs, paper)
        self.findings: Findings = all_findings(runs)

    def text(self) -> str:
        """Return what a terminal shows: the tables, and the findings on which these runs say something."""
        tables = "\n".join(table.markdown() for table in self.tables)
        return f"{tables}\n{findings_text(self.findings)}" if _are_told(self.findings) else tables

    def write(self, out: Path, refresh_seconds: Optional[int] = None) -> Path:
        """Write the report; each file is there whole or not at all.

        Where matplotlib is missing, there are no figures, and a line on standard error says what to install.

        Args:
            out: folder; made where it is missing.
            refresh_seconds: how often the page loads itself anew; None: never.

        Returns:
            The page.
        """
        out.mkdir(parents=True, exist_ok=True)
        for table in self.tables:
            for ending, text in (("md", table.markdown()), ("csv", table.csv()), ("tex", table.latex())):
                _write(out / f"{table.name}.{ending}", text)
        _write(out / "findings.md", findings_markdown(self.findings))
        page = build_page(self.runs, self.tables, self.findings, self._figures(out), out, refresh_seconds)
        _write(out / PAGE, page)
        return out / PAGE

    def _figures(self, out: Path) -> list[FigureFile]:
        try:
            return draw_all(self.runs, out / FIGURES, self.paper)
        except AlmaError as error:
            print(error, file=sys.stderr)
            return []


def findings_text(findings: Findings) -> str:
    """Return the verdicts as lines for a terminal; those that need other runs are only counted."""
    lines = []
    for run, found in findings:
        several = f" on {stream_name(run)}" if len(findings) > 1 else ""
        lines.append(f"What the paper found, and these runs{several}:")
        told = [finding for finding in found if finding.verdict is not Verdict.NOT_ENOUGH]
        lines += [f"- {finding.verdict.value}: {finding.claim} {finding.decided_by}" for finding in told]
        if len(told) < len(found):
            lines.append(f"- {Verdict.NOT_ENOUGH.value} for {len(found) - len(told)} more")
    return "\n".join(lines) + "\n"


def findings_markdown(findings: Findings) -> str:
    """Return all findings with the numbers that decide them."""
    lines = ["# What the paper found, and these runs", ""]
    for run, found in findings:
        if len(findings) > 1:
            lines += [f"## {stream_name(run)}", ""]
        for finding in found:
            lines.append(f"- **{finding.verdict.value}**: {finding.claim} ({finding.source}) {finding.decided_by}")
            lines += [f"  - {comparison.show()}" for comparison in finding.comparisons]
        lines.append("")
    return "\n".join(lines)


def _are_told(findings: Findings) -> bool:
    return any(finding.verdict is not Verdict.NOT_ENOUGH for _, found in findings for finding in found)


def _write(path: Path, text: str) -> None:
    with open_atomically(path, "w") as file:
        file.write(text)
