"""Write a report on runs: files with tables, files with figures, and an HTML page with summary, tables and figures."""

import base64
import importlib.util
import math
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import jinja2

from fairseq_alma.errors import AlmaError, printable, refuse_irregular
from fairseq_alma.files import open_atomically
from fairseq_alma.report.read_run import Experiment, RecordedRun, experiments
from fairseq_alma.report.tables import all_tables, are_on_several_streams, metric_names, show_count
from fairseq_alma.runs.run_folder import TRAIN_LOG, RunFolder
from fairseq_alma.terminal import print_line

PAGE, FIGURES, TITLE = "index.html", "figures", "<title>Anytime learning: "
TABLES = ("perplexity", "error", "cost", "growth", "iid", "holdouts", "evaluation", "runs")
TEXTS = {"md": "markdown", "csv": "csv", "tex": "latex"}
DRAWINGS = ("curve", "trade-off", "growth")
SAMPLE = "sample.txt"
"""Name of an optional file in a run folder: text that the newest model generated."""


def sentences(groups: Sequence[Experiment]) -> list[str]:
    """Return sentences about the best learner at the end of the stream and over all arrivals.

    Compare only complete experiments on the longest streams. Return an empty list for fewer than two such experiments.
    """
    longest = max(len(each.first.arrivals) for each in groups)
    complete = [each for each in groups if each.is_complete and len(each.first.arrivals) == longest]
    if len(complete) < 2:
        return []
    value, _, over_stream = metric_names(complete[0].first)
    unit, digits = ("", 2) if complete[0].first.is_text else (" %", 1)
    figures: list[tuple[str, str, Callable[[RecordedRun], float]]] = [
        ("at the end", f"test {value}", lambda run: run.final),
        (f"over all {longest} arrivals", over_stream, lambda run: run.over_stream),
    ]
    if are_on_several_streams(complete):
        if not complete[0].first.is_text:
            return []
        digits, figures = 3, [("at the end", "bits per byte", lambda run: run.bits_per_byte)]
    lines = []
    for when, name, figure in figures:
        spreads = ((spread, each) for each in complete if (spread := each.spread(figure)))
        ranked = sorted((pair for pair in spreads if math.isfinite(pair[0].mean)), key=lambda pair: pair[0].mean)
        if len(ranked) < 2:  # the models of the other learners diverged
            continue
        (best, winner), (second, runner_up) = ranked[:2]
        gap, seeds = best.minus(second), len(best.by_seed)
        doubt = ""
        if gap is None or len(gap.by_seed) < 2:
            doubt = " The two best have fewer than two seeds in common; another seed may change the order."
        elif abs(gap.mean) <= gap.half_interval():
            doubt = " The difference is not significant over these seeds (95 % confidence interval)."
        percent = 100 * (1 - best.mean / second.mean) if second.mean else 0.0
        shown = f"{best.show(digits)}{unit if name != over_stream else ''}"
        over = f"over {seeds} {'seed' if seeds == 1 else 'seeds'}"
        other = (
            f"{percent:.1f} % lower than {runner_up.name} ({second.show(digits)}{unit if name != over_stream else ''})"
        )
        lines.append(f"Best {when}: {winner.name}, {name} {shown} {over}, {other}.{doubt}")
    return lines


def describe_run(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield (title, sentence) pairs about a run on text: newest model, last arrival, training perplexity."""
    done = run.done
    if not run.is_text or done.empty:
        return
    last = done.iloc[-1]
    bits = "" if math.isnan(run.bits_per_byte) else f", {run.bits_per_byte:.3f} bits per byte"
    arrivals = f"mega-batch {done.index[-1] + 1} of {len(run.arrivals)}"
    size = show_count(last.num_params)
    yield "Newest model", f"after {arrivals}: test perplexity {last.value:.2f}{bits}, {size} parameters"
    if len(done) > 1 and math.isfinite(last.value / (before := done.iloc[-2].value)):  # else a model diverged
        gain = f"{100 * abs(1 - last.value / before):.1f} % {'lower' if last.value <= before else 'higher'}"
        yield "Last arrival", f"test perplexity {gain} than after the previous stage ({before:.2f})"
    log = RunFolder(run.path).stage_folder(int(last.stage)) / TRAIN_LOG.format(0)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    # The log is of one model.
    if last.num_members == 1 and (losses := re.findall(r'\| train \| \{.*"train_nll_loss": "([\d.]+)"', text)):
        train = 2 ** float(losses[-1])  # fairseq logs the loss in bits per token.
        figures = f"mean train perplexity {train:.2f} in the last epoch, test perplexity {last.value:.2f}"
        yield "Training and test", figures


class Report:
    """A report on one or more runs that use one kind of data; runs may be incomplete."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = runs
        self.groups = experiments(runs)
        self.tables = all_tables(self.groups)
        self.sentences = sentences(self.groups)
        self.details = list(describe_run(runs[0])) if len(runs) == 1 else []
        for name, path in [(each.name, run.path / SAMPLE) for each in self.groups for run in each.runs]:
            if path.is_file() and (text := path.read_text(encoding="utf-8", errors="replace")[:2000].strip()):
                self.details.append((f"Sample of text, {name}", text))

    def text(self) -> str:
        """Return the report for a terminal: result table, sentences, and all other tables except the table of runs."""
        result, *others = (table.markdown() for table in self.tables if table.name != "runs")
        lines = [*self.sentences, *(f"{title}: {sentence}" for title, sentence in self.details)]
        return "\n".join([result, *([*lines, ""] if lines else []), *others])

    def write(self, out: Path) -> Path:
        """Write tables, figures and an HTML page to a folder; return the path of the page.

        Remove the tables and figures of an earlier report. Write no figures if matplotlib is not installed.

        Raises:
            AlmaError: the folder has other files with names of a report.
        """
        texts = {f"{table.name}.{end}": getattr(table, how)() for table in self.tables for end, how in TEXTS.items()}
        drawings: list[Any] = []
        if importlib.util.find_spec("matplotlib") is None:
            print_line("figures require matplotlib; run pip install 'fairseq-alma[report]'", sys.stderr)
        else:
            from fairseq_alma.report import figures

            drawings = figures.draw_all(self.groups)
        known = {f"{name}.{end}" for name in TABLES for end in TEXTS}
        known |= {f"{FIGURES}/{name}.{end}" for name in DRAWINGS for end in ("png", "pdf")}
        for name in (PAGE, *texts):  # Check all paths before writing the first file.
            refuse_irregular(out / name)
        page = (out / PAGE).read_text(encoding="utf-8", errors="replace") if (out / PAGE).is_file() else ""
        other = [name for name in (PAGE, *sorted(known)) if (out / name).exists()]
        if other and TITLE not in page[:1000]:
            raise AlmaError(f"--out {out}: expected a report, found another {other[0]}; give a new folder")
        for name in known - set(texts):
            (out / name).unlink(missing_ok=True)

        def write(name: str, text: str) -> None:
            with open_atomically(out / name, "w") as file:
                file.write("\n".join(map(printable, text.split("\n"))))

        if not page:  # The page marks the folder as a report.
            write(PAGE, self._page([], out))
        pictures = [(drawing, figures.write(drawing, out / FIGURES)) for drawing in drawings]
        for name, text in (*texts.items(), (PAGE, self._page(pictures, out))):
            write(name, text)
        return out / PAGE

    def _page(self, pictures: Sequence[Any], out: Path) -> str:
        syntax: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "undefined": jinja2.StrictUndefined}
        environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, ""), lstrip_blocks=True, **syntax)
        figures = [
            (drawing, base64.b64encode(paths["png"].read_bytes()).decode("ascii"), paths["png"].relative_to(out))
            for drawing, paths in pictures
        ]
        first, stream = self.runs[0], self.runs[0].stream
        name, test = stream.get("dataset") or Path(str(stream["path"])).name, stream.get("test") or {}
        if first.is_text:
            data = [f"vocabulary {stream['vocab_size']:,}", f"{show_count(test.get('num_tokens', 0))} test tokens"]
        else:
            data = [f"{stream['num_classes']} classes", f"{show_count(test.get('num_images', 0))} test images"]
        return environment.get_template("page.html.jinja").render(
            curve=figures[:1],
            figures=figures[1:],
            result=self.tables[0],
            tables=[table for table in self.tables[1:] if table.name != "runs"],
            sentences=self.sentences,
            details=self.details,
            learners=list(dict.fromkeys(run.learner for run in self.runs)),
            stream=", ".join([f"{name}: {len(first.arrivals)} mega-batches", *data]),
            versions=", ".join(f"{name} {number}" for name, number in (first.record.get("versions") or {}).items()),
            runs=[(each.name, run, run.record.get("command", "")) for each in self.groups for run in each.runs],
            written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        )


def require_comparable(runs: Sequence[RecordedRun], mix: bool) -> tuple[list[RecordedRun], list[AlmaError]]:
    """Return (runs that are comparable to the first run, one error for each other run).

    Args:
        runs: runs to report.
        mix: whether to accept runs on other streams of the same kind of data (text or images).
    """
    first = runs[0]
    kept = [run for run in runs if run.is_text == first.is_text and (mix or run.stream_key == first.stream_key)]
    advice = "report this run separately"
    if not mix and len({run.is_text for run in runs}) == 1:
        advice += ", or give --mix to compare runs on different streams"
    names = {run: f"{run.stream['path']}, fingerprint {run.stream['fingerprint'][:12]}" for run in runs}
    errors = [
        AlmaError(f"{run.path}: expected the stream of {first.path} ({names[first]}), found {names[run]}; {advice}")
        for run in runs
        if run not in kept
    ]
    return kept, errors
