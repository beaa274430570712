"""Puts facts, findings, tables and figures into one HTML file that needs nothing else."""

import base64
import os
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Optional, Protocol, Sequence

import jinja2

from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.findings import Finding, Verdict
from fairseq_alma.report.page.facts import learner_names, page_facts, run_facts, stream_name
from fairseq_alma.report.run_figures import IMAGES, TEXT, RunFigures
from fairseq_alma.report.table import Table

TEMPLATE = "page.html.jinja"
MAX_SVG_BYTES = 600_000  # a drawing of more is heavier than its picture
MARKS = {
    Verdict.HELD: "held",
    Verdict.IN_PART: "part",
    Verdict.NOT_HELD: "not",
    Verdict.TOO_CLOSE: "close",
    Verdict.NOT_ENOUGH: "few",
}


class Drawn(Protocol):
    """A figure as files: what the page needs of `fairseq_alma.report.figures.FigureFile`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def caption(self) -> str: ...  # noqa: D102
    @property
    def png(self) -> Path: ...  # noqa: D102
    @property
    def pdf(self) -> Path: ...  # noqa: D102
    @property
    def svg(self) -> Optional[Path]: ...  # noqa: D102


@dataclass(frozen=True)
class Picture:
    """A figure as the page holds it.

    Attributes:
        title: a few words.
        caption: one paragraph.
        source: the picture itself, as a ``data:`` address.
        links: kind and relative address of the files beside the page.
    """

    title: str
    caption: str
    source: str
    links: list[tuple[str, str]]


def build_page(
    runs: Sequence[RunFigures],
    tables: Sequence[Table],
    findings: Sequence[tuple[RunFigures, Sequence[Finding]]],
    figures: Sequence[Drawn],
    out: Path,
    refresh_seconds: Optional[int] = None,
) -> str:
    """Return the page.

    Args:
        runs: what is reported.
        tables: in the order in which they are shown.
        findings: of each stream, with a run on it.
        figures: in the order in which they are shown.
        out: folder that the page is written to; its links start there.
        refresh_seconds: how often the page loads itself anew; None: never.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fairseq_alma.report.page", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    groups = [group for kind in (TEXT, IMAGES) for group in experiments([run for run in runs if run.kind == kind])]
    labels = {group.first.settings: group.name for group in groups}
    order = {settings: rank for rank, settings in enumerate(labels)}
    common = os.path.commonpath([run.path.absolute().parent for run in runs])
    return environment.get_template(TEMPLATE).render(
        style=_resource("page.css"),
        script=_resource("page.js"),
        kinds=[kind for kind in (TEXT, IMAGES) if any(run.kind == kind for run in runs)],
        learners=learner_names(groups),
        facts=page_facts(runs, groups),
        streams=[(stream_name(run), *_split(found)) for run, found in findings],
        marks=MARKS,
        outcomes={1: "✓", 0: "≈", -1: "✗"},
        pictures=[_picture(figure, out) for figure in figures],
        tables=tables,
        runs=run_facts(sorted(runs, key=lambda run: (order[run.settings], run.seed)), labels),
        short_paths={str(run.path): os.path.relpath(run.path, common) for run in runs},
        refresh_seconds=refresh_seconds,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _split(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Part those that these runs say something about from those that need other runs."""
    told = [finding for finding in findings if finding.verdict is not Verdict.NOT_ENOUGH]
    return told, [finding for finding in findings if finding.verdict is Verdict.NOT_ENOUGH]


def _picture(figure: Drawn, out: Path) -> Picture:
    files = [("PNG", figure.png), ("PDF", figure.pdf), ("SVG", figure.svg)]
    links = [(kind, os.path.relpath(path, out)) for kind, path in files if path is not None]
    if figure.svg is not None and figure.svg.stat().st_size <= MAX_SVG_BYTES:
        kind, path = "svg+xml", figure.svg
    else:
        kind, path = "png", figure.png
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return Picture(figure.title, figure.caption, f"data:image/{kind};base64,{content}", links)
