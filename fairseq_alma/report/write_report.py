"""Writes a whole report into a folder: tables, findings, figures and the page that holds them; notices news.

What it wrote stands in ``alma-report.json`` with its checksums, so that the next report there removes what it does not
have itself. A file that is not in the list, or not as it was written, is the user's and stays.
"""

import sys
import time
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import msgspec

from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import Sha256, as_record, open_atomically, read_json_object, write_json_atomically
from fairseq_alma.report.figures import FigureFile, draw_all
from fairseq_alma.report.finding import Finding, Verdict
from fairseq_alma.report.findings import all_findings
from fairseq_alma.report.page import build_page, findings_title
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.tables import all_tables
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD
from fairseq_alma.terminal import tell

PAGE = "index.html"
FIGURES = "figures"
WRITTEN = "alma-report.json"
POLL_SECONDS = 2.0
Findings = Sequence[tuple[Any, Sequence[Finding]]]


class Written(msgspec.Struct, frozen=True):
    """``alma-report.json``: the files of the report, by their paths in its folder, and the SHA-256 of each."""

    files: dict[str, Sha256]


class Report:
    """Everything that is said of a set of runs, at least one; with the paper's own numbers beside it, or without."""

    def __init__(self, runs: RunTable, paper: bool = False) -> None:
        self.runs = runs
        self.paper = paper
        self.tables = all_tables(runs, paper)
        self.findings: Findings = all_findings(runs)

    def text(self) -> str:
        """Return what a terminal shows: the tables, and the findings on which these runs say something."""
        tables = "\n".join(table.markdown() for table in self.tables)
        are_told = any(each.is_told for _, found in self.findings for each in found)
        return f"{tables}\n{findings_text(self.findings)}" if are_told else tables

    def write(self, out: Path, refresh_seconds: Optional[int] = None) -> Path:
        """Write the report and return its page; each file is there whole or not at all.

        Files of an earlier report there that this one does not have are removed.

        Where matplotlib is missing, there are no figures, and a line on standard error says what to install. The page
        loads itself anew every ``refresh_seconds``; None: never.
        """
        texts = {
            f"{table.name}.{ending}": text
            for table in self.tables
            for ending, text in (("md", table.markdown()), ("csv", table.csv()), ("tex", table.latex()))
        }
        texts["findings.md"] = findings_markdown(self.findings)
        out.mkdir(parents=True, exist_ok=True)
        before = _written_before(out)
        for name, text in texts.items():
            _write(out / name, text)
        figures = self._figures(out)
        _write(out / PAGE, build_page(self.runs, self.tables, self.findings, figures, out, refresh_seconds))
        drawn = [str(path.relative_to(out)) for figure in figures for path in figure.files.values()]
        _remove_unchanged(out, {name: sha256 for name, sha256 in before.items() if name not in {PAGE, *texts, *drawn}})
        files = {name: file_sha256(out / name) for name in (PAGE, *texts, *drawn)}
        write_json_atomically(out / WRITTEN, {"files": files})
        return out / PAGE

    def _figures(self, out: Path) -> list[FigureFile]:
        try:
            return draw_all(self.runs, out / FIGURES, self.paper)
        except AlmaError as error:
            tell(str(error), sys.stderr)
            return []


def findings_text(findings: Findings) -> str:
    """Return the verdicts as lines for a terminal; those that need other runs are only counted."""
    lines = []
    for run, found in findings:
        several = f" on {findings_title(run)}" if len(findings) > 1 else ""
        lines.append(f"What the paper found, and these runs{several}:")
        told = [finding for finding in found if finding.is_told]
        lines += [f"- {finding.verdict.value}: {finding.claim} {finding.decided_by}" for finding in told]
        if len(told) < len(found):
            lines.append(f"- {Verdict.NOT_ENOUGH.value} for {len(found) - len(told)} more")
    return "\n".join(lines) + "\n"


def findings_markdown(findings: Findings) -> str:
    """Return all findings with the numbers that decide them."""
    lines = ["# What the paper found, and these runs", ""]
    for run, found in findings:
        if len(findings) > 1:
            lines += [f"## {findings_title(run)}", ""]
        for finding in found:
            lines.append(f"- **{finding.verdict.value}**: {finding.claim} ({finding.source}) {finding.decided_by}")
            lines += [f"  - {comparison.show()}" for comparison in finding.comparisons]
        lines.append("")
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    with open_atomically(path, "w") as file:
        file.write(text)


def _written_before(out: Path) -> dict[str, str]:
    """Return what `Written` says of the report that is there; nothing where none is, or one from before the list."""
    path, remedy = out / WRITTEN, "remove it, and tables of an earlier report stay"
    if not path.exists():
        return {}
    return as_record(read_json_object(path, remedy), Written, path, remedy).files


def _remove_unchanged(out: Path, files: Mapping[str, str]) -> None:
    """Remove files of a report that are in its folder, as they were written."""
    for name, sha256 in files.items():
        path = out / name
        is_inside = path.parent in (out, out / FIGURES) and not path.is_symlink()  # whatever the list says
        if is_inside and path.is_file() and file_sha256(path) == sha256:
            path.unlink()


def changes(paths: Sequence[Path]) -> Iterator[None]:
    """Yield at once, and then each time that a stage has become complete or a run has begun; without end.

    Args:
        paths: folders of runs, which need not exist yet.
    """
    while True:
        seen = _state(paths)
        yield
        while _state(paths) == seen:
            time.sleep(POLL_SECONDS)


def _state(paths: Sequence[Path]) -> list[tuple[bool, int, int]]:
    """Return for each run whether it has begun, how many stages are complete, and when the last one was."""
    state = []
    for path in paths:
        stamps = [record.stat().st_mtime_ns for record in path.glob(f"stage-*/{STAGE_RECORD}")]
        state.append(((path / RUN_RECORD).is_file(), len(stamps), max(stamps, default=0)))
    return state
