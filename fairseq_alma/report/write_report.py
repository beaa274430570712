"""Writes a whole report into a folder: tables, findings, figures and the page that holds them; notices news.

What it wrote stands in ``alma-report.json`` with its checksums, so that the next report there removes what it does not
have itself. A file that is not in the list, or not as it was written, is the user's and stays. The page needs no other
file.

Page and terminal begin with what the run came to, in words, where there is a single run, on text: what its records, its
last training log and its stream say; what is missing there is left out. The rules of thumb (`LEARNED_BY_HEART`,
`STILL_LEARNING`) are no results of the paper's.
"""

import base64
import json
import math
import os
import shlex
import sys
import time
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import jinja2
import msgspec
import numpy as np

from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError, printable, refuse_irregular
from fairseq_alma.files import Sha256, as_record, open_atomically, read_json_object, write_json_atomically
from fairseq_alma.options import flag
from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.figures import FigureFile, draw_all
from fairseq_alma.report.finding import Finding, Verdict
from fairseq_alma.report.findings import all_findings
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import IMAGES, TEXT, experiment_key, show_count, show_power
from fairseq_alma.report.tables import all_tables
from fairseq_alma.runs.lookup import stream_of_run
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.runs.study import FREE_OPTIONS, OPTION_OF, is_begun_on
from fairseq_alma.terminal import tell

LEARNED_BY_HEART, STILL_LEARNING = 0.10, 0.03
"""Nats a token by which the training text is predicted better than the test text."""
FORETOLD = 20
"""Percent by which the last update may have lowered perplexity for the next one to be foretold; see `_next`."""


def own_numbers(runs: RunTable) -> list[tuple[str, str]]:
    """Return titles and sentences on a run on text; nothing for several runs, images, or before the first update."""
    facts = runs.facts
    done = runs.arrivals[runs.arrivals.done.astype(bool)]
    if len(facts) != 1 or not facts.is_text.iloc[0] or done.empty:
        return []
    return list(_said(facts.iloc[0], done.sort_values("arrival")))


def own_text(numbers: list[tuple[str, str]]) -> str:
    """Return the same as lines for a terminal."""
    return "".join(f"{title}: {sentence}\n" for title, sentence in numbers)


def _said(run: Any, done: Any) -> Iterator[tuple[str, str]]:
    last, counts = done.iloc[-1], (run.stream.get("test") or {})
    log_ppl = np.log(done.value.to_numpy())
    shown = _shown(last.value, counts)
    yield (
        "Newest",
        f"after mega-batch {last.arrival + 1} of {run.num_arrivals}: {shown} on the test set, "
        f"{show_count(last.num_params)} parameters",
    )
    gain = math.nan
    if len(done) > 1:
        gain = 100 * -math.expm1(log_ppl[-1] - log_ppl[-2])
        better = "lower" if gain >= 0 else "higher"
        yield "Last update", f"test perplexity {abs(gain):.1f} % {better} than before it ({done.value.iloc[-2]:.2f})"
    if (passes := _passes(run, last)) is not None:
        tokens, times = passes
        yield "Training", f"{last.num_updates:,.0f} updates, {times:.1f} passes over {show_count(tokens)} new tokens"
    if (train := _training_loss(run.path, last.stage)) is not None:
        yield "Training text", _beside(train, log_ppl[-1])
    if 0 <= gain <= FORETOLD and run.iid == 0:
        yield "Forecast", f"{_shown(_next(done), counts)} after another such mega-batch, if it goes on as it went"


def _shown(ppl: float, test: dict[str, int]) -> str:
    tokens, size = test.get("num_tokens", 0), test.get("num_bytes", 0)
    bits = f"{math.log2(ppl) * tokens / size:.3f} bits per byte, " if size and ppl > 0 else ""
    return f"{bits}perplexity {ppl:.2f}"


def _passes(run: Any, last: Any) -> Optional[tuple[int, float]]:
    """Return the tokens that came since the update before, and how often they were read; None without the stream."""
    folder = RunFolder(run.path)
    try:
        record, stage = folder.read_run(), folder.read_stage(int(last.stage))
        assert record is not None and stage is not None  # they were read before
        stream = Stream.open(stream_of_run(folder, record))
        if not is_begun_on(record, stream):
            return None
        tokens = sum(stream.megabatch(number).num_tokens for number in stage["megabatches"])
    except AlmaError:
        return None
    return (tokens, stage["train_tokens"] / tokens) if tokens and "train_tokens" in stage else None


def _training_loss(run: Path, stage: float) -> Optional[float]:
    """Return the mean training loss of the last pass of a stage's first member, nats a token; None where no log is."""
    path = RunFolder(run).stage_folder(int(stage)) / "train-member-0.log"
    try:
        lines = [
            line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if "| train | {" in line
        ]
        figures = json.loads(lines[-1].split("| train | ", 1)[1])
        return float(figures.get("train_nll_loss", figures["train_loss"])) * math.log(2)
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return None


def _beside(train: float, test: float) -> str:
    """Say what the loss on the training text beside that on the test text means, both in nats."""
    said = f"perplexity {math.exp(train):.2f} in its last pass, {math.exp(test):.2f} on the test set: "
    if test - train > LEARNED_BY_HEART:
        return said + "much of it is learned by heart; more text, fewer passes or a smaller model would help"
    if test - train < STILL_LEARNING:
        return said + "hardly any of it is learned by heart; more passes or a larger model would still help"
    return said + "some of it is learned by heart; more text would help more than more passes"


def _next(done: Any) -> float:
    """Return the test perplexity after one more update like the last: a line through the last two.

    Of the loss over the logarithm of all updates so far. In the kept records of language runs (``recipes/records``) the
    median of its errors was 1 % where the update before had lowered perplexity by up to 10 %, 2 % up to 20 %, and 12 %
    beyond (95, 180 and 200 arrivals).
    """
    updates, loss = done.num_updates.cumsum().to_numpy(), np.log(done.value.to_numpy())
    slope = (loss[-1] - loss[-2]) / math.log(updates[-1] / updates[-2])
    return math.exp(loss[-1] + slope * math.log(1 + done.num_updates.iloc[-1] / updates[-1]))


PAGE, FIGURES, WRITTEN = "index.html", "figures", "alma-report.json"
POLL_SECONDS = 2.0
MAX_SVG_BYTES = 600_000  # a drawing of more is heavier than its picture
MARKS = dict(zip(Verdict, ("held", "part", "not", "close", "few", "few"), strict=True))
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
        self.own = own_numbers(runs)

    def text(self) -> str:
        """Return what a terminal shows: a run's own numbers, tables, and findings on which these runs say something."""
        tables = "\n".join([*([own_text(self.own)] if self.own else []), *(table.markdown() for table in self.tables)])
        are_told = any(each.is_told for _, found in self.findings for each in found)
        return f"{tables}\n{findings_text(self.findings)}" if are_told else tables

    def write(self, out: Path, refresh_seconds: Optional[int] = None) -> Path:
        """Write the report and return its page; each file is there whole or not at all.

        Files of an earlier report there that this one does not have are removed. Where matplotlib is missing, there
        are no figures, and a line on standard error says what to install. The page loads itself anew every
        ``refresh_seconds``; None: never.
        """
        texts: dict[str, str] = {}
        for table in self.tables:
            texts |= {f"{table.name}.md": table.markdown(), f"{table.name}.csv": table.csv()}
            texts[f"{table.name}.tex"] = table.latex()
        texts["findings.md"] = findings_markdown(self.findings)
        out.mkdir(parents=True, exist_ok=True)
        before = _written_before(out / WRITTEN)
        for name in (PAGE, WRITTEN, *texts):  # all of them before the first is written
            refuse_irregular(out / name)
        for name, text in texts.items():
            _write(out / name, text)
        figures: list[FigureFile] = []
        try:
            figures = draw_all(self.runs, out / FIGURES, self.paper)
        except AlmaError as error:
            tell(str(error), sys.stderr)
        _write(out / PAGE, self.page(figures, out, refresh_seconds))
        drawn = [str(path.relative_to(out)) for figure in figures for path in figure.files.values()]
        files = {name: file_sha256(out / name) for name in (PAGE, *texts, *drawn)}
        _remove_unchanged(out, {name: sha256 for name, sha256 in before.items() if name not in files})
        write_json_atomically(out / WRITTEN, {"files": files})
        return out / PAGE

    def page(self, figures: Sequence[FigureFile], out: Path, refresh_seconds: Optional[int] = None) -> str:
        """Return the page, whose links start in ``out``; it may load itself anew every so many seconds."""
        environment = jinja2.Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        facts = self.runs.facts
        kinds = [kind for kind in (TEXT, IMAGES) if kind in set(facts.kind)]
        groups = [group for kind in kinds for group in experiments(self.runs.where(facts.kind == kind))]
        names = {group.first.settings: (rank, group.name) for rank, group in enumerate(groups)}
        runs = sorted(facts.itertuples(), key=lambda run: (names[run.settings][0], run.seed))
        common = os.path.commonpath([path.absolute().parent for path in facts.path])
        return environment.from_string(_resource("page.html.jinja")).render(
            style=_resource("page.css"),
            script=_resource("page.js"),
            kinds=kinds,
            learners=_distinct(group.first.name for group in groups),
            facts=_head(facts, [group.first for group in groups]),
            streams=[(findings_title(run), found) for run, found in self.findings],
            marks=MARKS,
            outcomes={1: "✓", 0: "≈", -1: "✗"},
            pictures=[_picture(figure, out) for figure in figures],
            tables=self.tables,
            own=self.own,
            runs=[(names[run.settings][1], run, command_of(run)) for run in runs],
            short_paths={run.shown_path: printable(os.path.relpath(run.path, common)) for run in runs},
            refresh_seconds=refresh_seconds,
            written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        )


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
        lines += [f"## {findings_title(run)}", ""] if len(findings) > 1 else []
        for finding in found:
            lines.append(f"- **{finding.verdict.value}**: {finding.claim} ({finding.source}) {finding.decided_by}")
            lines += [f"  - {comparison.show()}" for comparison in finding.comparisons]
        lines.append("")
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    with open_atomically(path, "w") as file:
        file.write(text)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _written_before(path: Path) -> dict[str, str]:
    """Return what `Written` says of the report that is there; nothing where none is."""
    remedy = "remove it, and tables of an earlier report stay"
    return as_record(read_json_object(path, remedy), Written, path, remedy).files if path.exists() else {}


def _remove_unchanged(out: Path, files: Mapping[str, str]) -> None:
    """Remove files of a report that are in its folder, as they were written."""
    for name, sha256 in files.items():
        path = out / name
        is_inside = path.parent in (out, out / FIGURES) and not path.is_symlink()  # whatever the list says
        if is_inside and path.is_file() and file_sha256(path) == sha256:
            path.unlink()


def _picture(figure: FigureFile, out: Path) -> tuple[FigureFile, str, list[tuple[str, str]]]:
    """Return a figure, itself as a ``data:`` address, and kind and relative address of the files beside the page."""
    links = [(kind.upper(), os.path.relpath(path, out)) for kind, path in figure.files.items()]
    svg = figure.files.get("svg")
    is_light = svg is not None and svg.stat().st_size <= MAX_SVG_BYTES
    kind, path = ("svg+xml", figure.files["svg"]) if is_light else ("png", figure.files["png"])
    return figure, f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}", links


def _head(facts: Any, firsts: Sequence[Any]) -> dict[str, list[str]]:
    """Return the lines of the page's head, from the facts of all runs and those of one run of each experiment."""
    stages = f"{facts.num_done.sum():,} of {facts.num_planned.sum():,} stages"
    head = {
        "Stream": _distinct(_describe_stream(run) for run in facts.itertuples()),
        "Learners": [", ".join(_distinct(run.name for run in firsts))],
        "Waiting times": [", ".join(map(str, sorted(set(facts.wait))))],
        "Backbones": ["; ".join(_distinct(run.backbone for run in firsts))],
        "Seeds": [", ".join(map(str, sorted(set(facts.seed))))],
        "Runs": [f"{facts.is_complete.sum()} of {len(facts)} complete, {stages}"],
        "Cost": [f"{show_power(facts.computation.sum())} training FLOPs, {facts.hours.sum():,.1f} hours"],
        "Versions": _distinct(", ".join(f"{name} {number}" for name, number in x.items()) for x in facts.versions),
    }
    return {name: texts for name, texts in head.items() if any(texts)}


def command_of(run: Any) -> str:
    """Spell the alma-stream command that a run.json records.

    Of ``--jobs`` there is only that it was given, as any number gives the same files.
    """
    words = ["alma-stream", "--stream", str(run.stream["path"]), "--learner", run.learner, "--run", run.shown_path]
    words += ["--seed", str(run.seed)]
    for name, value in run.options.items():
        if name not in FREE_OPTIONS and value is not None and value is not False:
            said = [] if value is True and name != "jobs" else [str(1 if name == "jobs" else value)]
            words += [OPTION_OF.get(name, flag(name)), *said]
    words.append("--")
    for name, value in run.train_options.items():
        words += [name] if value == "" else [name, str(value)]
    return shlex.join(words)


def stream_name(run: Any) -> str:
    """Name the stream in a word or two: its data set, or its folder, with the one above where that says nothing."""
    path = Path(run.stream["path"])
    return str(run.stream.get("dataset") or ("/".join(path.parts[-2:]) if path.name == "stream" else path.name))


def findings_title(run: Any) -> str:
    """Name what findings are about: the stream, and the settings of the runs where they are not the usual ones."""
    return f"{stream_name(run)}, {run.setting}" if run.setting else stream_name(run)


def _describe_stream(run: Any) -> str:
    stream = run.stream
    tokens = f"vocabulary of {stream['vocab_size']:,} tokens" if run.is_text else f"{stream['num_classes']} classes"
    test = (stream.get("test") or {}).get("num_tokens" if run.is_text else "num_images") or 0
    count = f"{show_count(test)} {'tokens' if run.is_text else 'images'} in the test set"
    digest = str(experiment_key(stream)[0])[:12]
    shared = ""
    if "decontaminated" in stream:
        size = stream["decontaminated"]
        shared = f", no {size} words of which in a row are trained on" if size else ", parts of which may be trained on"
    return f"{stream_name(run)}: {run.num_arrivals} mega-batches, {tokens}, {count}{shared} ({digest})"


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


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


def _state(paths: Sequence[Path]) -> list[tuple[bool, list[int]]]:
    """Return for each run whether it has begun, and when each stage was completed, by a clock that may be set back."""
    return [
        (
            (path / RUN_RECORD).is_file(),
            [record.stat().st_mtime_ns for record in sorted(path.glob(f"stage-*/{STAGE_RECORD}"))],
        )
        for path in paths
    ]
