"""Puts facts, findings, tables and figures into one HTML file that needs nothing else."""

import base64
import os
import shlex
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import jinja2

from fairseq_alma.errors import printable
from fairseq_alma.options import flag
from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.figures import FigureFile
from fairseq_alma.report.finding import Finding, Verdict
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import IMAGES, TEXT, experiment_key, show_count, show_power
from fairseq_alma.report.table import Table
from fairseq_alma.runs.study import FREE_OPTIONS, OPTION_OF

MAX_SVG_BYTES = 600_000  # a drawing of more is heavier than its picture
MARKS = dict(zip(Verdict, ("held", "part", "not", "close", "few", "few"), strict=True))


def build_page(
    runs: RunTable,
    tables: Sequence[Table],
    findings: Sequence[tuple[Any, Sequence[Finding]]],
    figures: Sequence[FigureFile],
    out: Path,
    refresh_seconds: Optional[int] = None,
) -> str:
    """Return the page, whose links start in ``out``; it may load itself anew every so many seconds."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    facts = runs.facts
    kinds = [kind for kind in (TEXT, IMAGES) if kind in set(facts.kind)]
    groups = [group for kind in kinds for group in experiments(runs.where(facts.kind == kind))]
    labels = {group.first.settings: group.name for group in groups}
    order = {settings: rank for rank, settings in enumerate(labels)}
    common = os.path.commonpath([path.absolute().parent for path in facts.path])
    return environment.from_string(_resource("page.html.jinja")).render(
        style=_resource("page.css"),
        script=_resource("page.js"),
        kinds=kinds,
        learners=_distinct(group.first.name for group in groups),
        facts=_head(facts, [group.first for group in groups]),
        streams=[(findings_title(run), found) for run, found in findings],
        marks=MARKS,
        outcomes={1: "✓", 0: "≈", -1: "✗"},
        pictures=[_picture(figure, out) for figure in figures],
        tables=tables,
        runs=[
            (labels[run.settings], run, command_of(run))
            for run in sorted(facts.itertuples(), key=lambda run: (order[run.settings], run.seed))
        ],
        short_paths={run.shown_path: printable(os.path.relpath(run.path, common)) for run in facts.itertuples()},
        refresh_seconds=refresh_seconds,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _picture(figure: FigureFile, out: Path) -> tuple[FigureFile, str, list[tuple[str, str]]]:
    """Return a figure, itself as a ``data:`` address, and kind and relative address of the files beside the page."""
    links = [(kind.upper(), os.path.relpath(path, out)) for kind, path in figure.files.items()]
    svg = figure.files.get("svg")
    is_light = svg is not None and svg.stat().st_size <= MAX_SVG_BYTES
    kind, path = ("svg+xml", figure.files["svg"]) if is_light else ("png", figure.files["png"])
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return figure, f"data:image/{kind};base64,{content}", links


def _head(facts: Any, firsts: Sequence[Any]) -> dict[str, list[str]]:
    """Return the lines of the page's head, from the facts of all runs and those of one run of each experiment."""
    stages = f"{facts.num_done.sum():,} of {facts.num_planned.sum():,} stages"
    versions = [", ".join(f"{name} {version}" for name, version in each.items()) for each in facts.versions]
    head = {
        "Stream": _distinct(_describe_stream(run) for run in facts.itertuples()),
        "Learners": [", ".join(_distinct(run.name for run in firsts))],
        "Waiting times": [", ".join(map(str, sorted(set(facts.wait))))],
        "Backbones": ["; ".join(_distinct(run.backbone for run in firsts))],
        "Seeds": [", ".join(map(str, sorted(set(facts.seed))))],
        "Runs": [f"{facts.is_complete.sum()} of {len(facts)} complete, {stages}"],
        "Cost": [f"{show_power(facts.computation.sum())} training FLOPs, {facts.hours.sum():,.1f} hours"],
        "Versions": _distinct(versions),
    }
    return {name: texts for name, texts in head.items() if any(texts)}


def command_of(run: Any) -> str:
    """Spell the alma-stream command that a run.json records."""
    words = ["alma-stream", "--stream", str(run.stream["path"]), "--learner", run.learner, "--run", run.shown_path]
    words += ["--seed", str(run.seed)]
    for name, value in run.options.items():
        if name not in FREE_OPTIONS and value is not None and value is not False:
            flag, value = _spelled(name, value)
            words += [flag, *([] if value is True else [str(value)])]
    words.append("--")
    for name, value in run.train_options.items():
        words += [name] if value == "" else [name, str(value)]
    return shlex.join(words)


def _spelled(name: str, value: Any) -> tuple[str, Any]:
    """Return the option, and its value, that a key of run.json stands for.

    Of ``--jobs`` there is only that it was given, as any number gives the same files.
    """
    return OPTION_OF.get(name, flag(name)), 1 if name == "jobs" else value


def stream_name(run: Any) -> str:
    """Name the stream in a word or two: its data set, or its folder, with the one above where that says nothing."""
    path = Path(run.stream["path"])
    folder = "/".join(path.parts[-2:]) if path.name == "stream" else path.name
    return str(run.stream.get("dataset") or folder)


def findings_title(run: Any) -> str:
    """Name what findings are about: the stream, and the settings of the runs where they are not the usual ones."""
    return f"{stream_name(run)}, {run.setting}" if run.setting else stream_name(run)


def _describe_stream(run: Any) -> str:
    stream = run.stream
    tokens = f"vocabulary of {stream['vocab_size']:,} tokens" if run.is_text else f"{stream['num_classes']} classes"
    test = (stream.get("test") or {}).get("num_tokens" if run.is_text else "num_images") or 0
    count = f"{show_count(test)} {'tokens' if run.is_text else 'images'} in the test set"
    digest = str(experiment_key(stream)[0])[:12]
    return f"{stream_name(run)}: {run.num_arrivals} mega-batches, {tokens}, {count} ({digest})"


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
