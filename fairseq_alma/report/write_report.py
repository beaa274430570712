"""Write a report on runs: tables as Markdown, CSV and LaTeX, figures, and an HTML page with all of them and a summary.

The tables show test metrics, cost, growth steps, i.i.d. controls, held-out losses, --then-evaluate metrics, and runs.
"""

import base64
import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Collection, Iterator, Mapping, Optional, Sequence, Union

import jinja2
from pandas import DataFrame

from fairseq_alma.errors import AlmaError, printable, refuse_irregular
from fairseq_alma.files import open_atomically
from fairseq_alma.report.read_run import Experiment, RecordedRun, Spread, experiments, iid_pairs
from fairseq_alma.runs.run_folder import TRAIN_LOG, RunFolder
from fairseq_alma.terminal import format_duration, print_line

PAGE, FIGURES, TITLE = "index.html", "figures", "<title>Anytime learning: "
TABLES = ("perplexity", "error", "cost", "growth", "iid", "holdouts", "evaluation", "runs")
TEXTS = {"md": "markdown", "csv": "csv", "tex": "latex"}
DRAWINGS = ("curve", "trade-off", "growth")
SAMPLE = "sample.txt"  # optional file in a run folder: text that the newest model generated
NOT_YET = "–"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, number, and standard deviation over seeds. The number of a name or a missing value is NaN."""

    text: str
    number: float = math.nan
    deviation: float = math.nan


Row = dict[str, Union[Cell, str]]
NOTHING = Cell(NOT_YET)


def number(value: float, digits: int) -> Cell:
    """Return a cell with a number rounded to ``digits`` decimals, or with a dash for NaN."""
    return NOTHING if math.isnan(value) else Cell(f"{value:,.{digits}f}", value)


def spread(value: Optional[Spread], digits: int, missing: str = NOT_YET) -> Cell:
    """Return a cell with mean and standard deviation over seeds, or the text ``missing`` if ``value`` is None."""
    return Cell(missing) if value is None else Cell(value.show(digits), value.mean, value.deviation)


def show_count(value: float) -> str:
    """Return a count as text with three significant digits, such as ``65.4M``, or ``3.62e+15`` for large counts."""
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
        unranked: indices of rows that are excluded when the smallest number is determined.
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
        """Return (text, whether the text is bold) for each cell in a visible column, row by row.

        In each column of `best`, the smallest number is bold if two or more finite numbers are outside `unranked` rows.
        """
        lowest = {}
        for title in self.best:
            ranked = [_cell(row[title]).number for index, row in enumerate(self.rows) if index not in self.unranked]
            known = [*filter(math.isfinite, ranked)]
            lowest[title] = min(known) if len(known) > 1 else math.nan
        body = []
        for index, row in enumerate(self.rows):
            ranks = {} if index in self.unranked else lowest
            cells = {title: _cell(row[title]) for title in self.header}
            body.append([(cell.text, ranks.get(title) == cell.number) for title, cell in cells.items()])
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
            cells = [NOTHING if row[title] == NOT_YET else row[title] for row in self.rows]
            columns[title] = [each if isinstance(each, str) else each.number for each in cells]
            deviations = [_cell(each).deviation for each in cells]
            if not all(map(math.isnan, deviations)):
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
    names = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escaped = re.sub(r"[&%$#_{}\\~^]", lambda found: names.get(found[0], f"\\{found[0]}"), text)
    return escaped.replace("±", r"$\pm$").replace("–", "--")


def filled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the union of the columns of all rows, arrivals last. A dash fills missing cells."""
    titles = list(dict.fromkeys(title for row in rows for title in row))
    titles.sort(key=lambda title: int(title[1:]) if title[1:].isdecimal() else -1)
    return [{title: row.get(title, NOTHING) for title in titles} for row in rows]


def all_tables(groups: Sequence[Experiment]) -> list[Table]:
    """Return all tables that have rows. The runs must use the same kind of data (text or images)."""
    makers = (result_table, cost_table, growth_table, iid_table, holdout_table, evaluation_table, run_table)
    return [table for table in (make(groups) for make in makers) if table.rows]


def metric_names(run: RecordedRun) -> tuple[str, str, str]:
    """Return three names: the test metric, its final value, and its mean (text) or sum (images) over all arrivals."""
    return ("perplexity", "final PPL", "avg PPL") if run.is_text else ("error", "final error", "CER")


def are_on_several_streams(groups: Sequence[Experiment]) -> bool:
    """Return whether test sets differ, so that perplexities and errors are not comparable."""
    return len({run.stream_key for each in groups for run in each.runs}) > 1


def shown_arrivals(num_arrivals: int) -> list[int]:
    """Return the arrivals to show: all arrivals (if at most 20), else the last arrival of each tenth of the stream."""
    if num_arrivals <= 20:
        return list(range(num_arrivals))
    return [round(num_arrivals * tenth / 10) - 1 for tenth in range(1, 11)]


def result_table(groups: Sequence[Experiment]) -> Table:
    """Return the table of test metrics of each experiment after each arrival and over the stream (Table 2)."""
    first = groups[0].first
    value, final, over_stream = metric_names(first)
    num_arrivals = max(len(each.first.arrivals) for each in groups)
    rows: list[Row] = []
    for each in groups:
        run = each.first
        row: Row = {"learner": each.label, **_distinguishing(each, groups), "experts": run.experts}
        sizes, complete = run.done.num_params, sum(run.is_complete for run in each.runs)
        ends = dict.fromkeys(map(show_count, [*sizes[:1], *sizes[-1:]]))
        row["params"] = Cell(" to ".join(ends) or NOT_YET, sizes.max())
        row["seeds"] = Cell(f"{complete}{'' if complete == len(each.runs) else f' of {len(each.runs)}'}", complete)
        for arrival in range(num_arrivals):
            waits = arrival < len(run.arrivals) and not (run.arrivals.planned[arrival] or run.arrivals.done[arrival])
            row[f"t{arrival}"] = spread(each.at(arrival), 2, "*" if waits else NOT_YET)
        row[over_stream] = spread(each.spread(lambda run: run.over_stream), 2 if run.is_text else 1)
        row[final] = spread(each.spread(lambda run: run.final), 2)
        if run.is_text:
            row["bits per byte"] = spread(each.spread(lambda run: run.bits_per_byte), 3)
        rows.append(row)
    hidden = {f"t{arrival}" for arrival in set(range(num_arrivals)) - {*shown_arrivals(num_arrivals)}}
    what = "mean over all arrivals" if first.is_text else "sum over all arrivals, in percentage points"
    notes = (
        f"Test {value}{'' if first.is_text else ' in percent'} after each mega-batch. t0: first mega-batch. *: the "
        f"learner waits, so its previous model is the current model (before the first stage: the untrained model). –: "
        f"no complete stage. {over_stream}: {what}. ±: standard deviation over seeds."
    )
    controls = [index for index, each in enumerate(groups) if each.first.options.get("iid")]
    best = set(rows[0]) - {"learner", "size", "options", "experts", "params", "seeds"}
    best = best & {"bits per byte"} if are_on_several_streams(groups) else best
    return Table(value, f"Test {value} after each mega-batch", notes, rows, best, hidden, controls)


def cost_table(groups: Sequence[Experiment]) -> Table:
    """Return the cost table: Mem and Comp (section 3.1), test FLOPs, updates and time of each experiment."""
    rows: list[Row] = []
    counts: dict[str, Callable[[RecordedRun], Any]] = {
        "Mem": lambda run: run.memory,
        "Comp": lambda run: run.done.train_flops.sum(),
        f"test FLOPs/{'token' if groups[0].first.is_text else 'image'}": lambda run: run.done.test_flops.iloc[-1],
        "updates": lambda run: run.done.num_updates.sum(),
    }
    for each in groups:
        row: Row = {"learner": each.label, **_distinguishing(each, groups), "experts": each.first.experts}
        for title, figure in counts.items():
            over_seeds = each.spread(figure)
            row[title] = NOTHING if over_seeds is None else Cell(show_count(over_seeds.mean), over_seeds.mean)
        hours = each.spread(lambda run: run.done.wall_seconds.sum() / 3600)
        row["time"] = NOT_YET if hours is None else format_duration(3600 * hours.mean)
        rows.append(row | {"hours": spread(hours, 2)})
    notes = (
        "Mem: parameters summed over all arrivals. Comp: training FLOPs. time: wall-clock time of all stages (h:mm:ss "
        "or m:ss), summed over processes that train members. Each number is a mean over the seeds with complete runs."
    )
    return Table("cost", "Cost over the stream", notes, filled(rows), hidden={"hours"})


def growth_table(groups: Sequence[Experiment]) -> Table:
    """Return the table of validation metrics before and after each growth step, and after training the grown model."""
    rows: list[Row] = []
    scale, value = (1.0, "perplexity") if groups[0].first.is_text else (100.0, "error in percent")
    for each in groups:
        arrivals = each.first.arrivals
        for arrival in arrivals.index[arrivals.done & arrivals.after_growth.notna()]:
            sizes, unit = arrivals.experts, ""
            if sizes.get(arrival - 1) == sizes[arrival]:
                sizes, unit = arrivals.params, " parameters"
            before = sizes.get(arrival - 1, math.nan)  # NaN if a record is missing
            columns = {"before": "before_growth", "after growth": "after_growth", "after training": "valid"}
            rows.append({
                "learner": each.label, **_distinguishing(each, groups), "at": f"t{arrival}",
                "experts": NOT_YET if math.isnan(before) else f"{before:,.0f} to {sizes[arrival]:,.0f}{unit}",
                **{title: spread(each.at(arrival, name, scale), 2) for title, name in columns.items()},
            })  # fmt: skip
    notes = (
        f"Validation {value} before and after each growth step (last weights), and after training the grown model "
        "(weights that are tested)."
    )
    return Table("growth", "Growth steps", notes, rows)


def iid_table(groups: Sequence[Experiment]) -> Table:
    """Return the table that compares sequential and i.i.d. training on the same k mega-batches (Table 1)."""
    rows: list[Row] = []
    for control, sequential, k in iid_pairs(groups):
        iid, other = control.at(k - 1), sequential.at(k - 1)
        if iid is not None and other is not None:
            common = iid.by_seed.keys() & other.by_seed.keys()
            means = [fmean(each.by_seed[seed] for seed in common) if common else each.mean for each in (other, iid)]
            gap = means[0] / means[1] - 1
            rows.append({
                "learner": sequential.first.learner, **_distinguishing(control, groups),
                "experts": control.first.experts, "k": Cell(str(k), k),
                "i.i.d.": spread(iid, 2), "sequential": spread(other, 2), "gap": Cell(f"{gap:+.1%}", gap),
            })  # fmt: skip
    notes = (
        "k: mega-batches in both runs, with about as many updates (i.i.d. fewer if a mega-batch is smaller than a "
        "batch). gap: sequential / i.i.d. - 1, over common seeds."
    )
    return Table("iid", "Sequential and i.i.d. training", notes, rows)


def _bits(result: Mapping[str, Any]) -> Cell:
    return number(result.get("bits_per_byte") or math.nan, 3)


def holdout_table(groups: Sequence[Experiment]) -> Table:
    """Return the table of losses on the held-out part of each mega-batch, for the first run of each experiment."""
    rows: list[Row] = []
    for each in groups:
        for arrival, holdouts in each.first.done.holdouts.dropna().items():
            before = holdouts[-1].get("before") or {}
            rows.append({
                "learner": each.name, "after": f"t{arrival}", "newest, before": _bits(before),
                **{f"m{holdout['megabatch']}": _bits(holdout) for holdout in holdouts},
            })  # fmt: skip
    notes = (
        "Loss in bits per byte on the held-out part of each mega-batch. m0: first mega-batch. newest, before: loss on "
        "the held-out part of the newest mega-batch before training on this mega-batch."
    )
    return Table("holdouts", "Held-out parts of the mega-batches", notes, filled(rows))


def evaluation_table(groups: Sequence[Experiment]) -> Table:
    """Return the table of metrics that ``--then-evaluate`` printed after each arrival, one row per run and metric."""
    rows: list[Row] = []
    for each in groups:
        for run in each.runs:
            metrics = run.done.evaluation.dropna()
            for metric in dict.fromkeys(name for values in metrics for name in values):
                row: Row = {"learner": each.name, "seed": Cell(str(run.seeds[0]), run.seeds[0]), "metric": metric}
                rows.append(
                    row | {f"t{t}": Cell(f"{v[metric]:.5g}", v[metric]) for t, v in metrics.items() if metric in v}
                )
    title, notes = "Evaluations after each mega-batch", "Metrics that the --then-evaluate command printed."
    return Table("evaluation", title, notes, filled(rows))


def run_table(groups: Sequence[Experiment]) -> Table:
    """Return the table of runs. Only the CSV file has the test metric after each arrival."""
    rows: list[Row] = []
    _, final, over_stream = metric_names(groups[0].first)
    for each in groups:
        for run in each.runs:
            rows.append({
                "run": str(run.path), "learner": each.name, "seed": Cell(str(run.seeds[0]), run.seeds[0]),
                "stages": Cell(f"{len(run.done)} of {run.arrivals.planned.sum()}", len(run.done)),
                over_stream: number(run.over_stream, 2), final: number(run.final, 2),
                **{f"t{arrival}": number(value, 2) for arrival, value in run.done.curve.items()},
            })  # fmt: skip
    rows = filled(rows)
    hidden = {title for title in rows[0] if title[1:].isdecimal()}
    return Table("runs", "Runs", "Run folder, number of complete stages, and results of each run.", rows, hidden=hidden)


def _distinguishing(each: Experiment, groups: Sequence[Experiment]) -> dict[str, str]:
    """Return the cells that distinguish experiments with the same label: size of the backbone and options."""
    columns = {"size": each.first.size} if len({other.first.size for other in groups}) > 1 else {}
    keys = [(other.label, other.first.experts, other.first.size) for other in groups]
    if len(set(keys)) < len(keys):
        known = {*each.first.size.split(", "), each.first.experts, f"{each.first.experts} experts"}
        columns["options"] = ", ".join(word for word in each.name.split(", ")[1:] if word not in known)
    return columns


def sentences(groups: Sequence[Experiment]) -> Iterator[str]:
    """Yield sentences about the best learner at the end of the stream and over all arrivals.

    Compare only complete experiments on the longest streams. Yield nothing for fewer than two such experiments.
    """
    longest = max(len(each.first.arrivals) for each in groups)
    complete = [each for each in groups if each.is_complete and len(each.first.arrivals) == longest]
    if len(complete) < 2:
        return
    value, _, over_stream = metric_names(complete[0].first)
    unit, digits = ("", 2) if complete[0].first.is_text else (" %", 1)
    figures: list[tuple[str, str, str, Callable[[RecordedRun], float]]] = [
        ("at the end", f"test {value}", unit, lambda run: run.final),
        (f"over all {longest} arrivals", over_stream, "", lambda run: run.over_stream),
    ]
    if are_on_several_streams(complete):  # images have no comparable metric, and bits per byte are NaN
        digits, figures = 3, [("at the end", "bits per byte", "", lambda run: run.bits_per_byte)]
    for when, name, unit, figure in figures:
        spreads = ((spread, each) for each in complete if (spread := each.spread(figure)))
        ranked = sorted((pair for pair in spreads if math.isfinite(pair[0].mean)), key=lambda pair: pair[0].mean)
        if len(ranked) < 2:  # the models of the other learners diverged
            continue
        (best, winner), (second, runner_up), *_ = ranked
        gap, seeds = best.minus(second), len(best.by_seed)
        doubt = ""
        if gap is None or len(gap.by_seed) < 2:
            doubt = " The two best have fewer than two seeds in common; another seed may change the order."
        elif abs(gap.mean) <= gap.half_interval():
            doubt = " The difference is not significant over these seeds (95 % confidence interval)."
        lower = f"{100 * (1 - best.mean / second.mean):.1f} % lower than" if best.mean < second.mean else "equal to"
        yield (
            f"Best {when}: {winner.name}, {name} {best.show(digits)}{unit} over {seeds} "
            f"{'seed' if seeds == 1 else 'seeds'}, {lower} {runner_up.name} "
            f"({second.show(digits)}{unit}).{doubt}"
        )


def describe_run(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield (title, sentence) pairs about a run on text: newest model, last arrival, training perplexity."""
    done = run.done
    if not run.is_text or done.empty:
        return
    last = done.iloc[-1]
    bits = "" if math.isnan(run.bits_per_byte) else f", {run.bits_per_byte:.3f} bits per byte"
    figures = f"test perplexity {last.value:.2f}{bits}, {show_count(last.num_params)} parameters"
    yield "Newest model", f"after mega-batch {done.index[-1] + 1} of {len(run.arrivals)}: {figures}"
    if len(done) > 1 and math.isfinite(last.value / (before := done.iloc[-2].value)):  # else a model diverged
        gain = f"{100 * abs(1 - last.value / before):.1f} % {'lower' if last.value <= before else 'higher'}"
        yield "Last arrival", f"test perplexity {gain} than after the previous stage ({before:.2f})"
    log = RunFolder(run.path).stage_folder(int(last.stage)) / TRAIN_LOG.format(0)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    # The log is of one model. fairseq logs the loss in bits per token.
    if last.num_members == 1 and (losses := re.findall(r'\| train \| \{.*"train_nll_loss": "([\d.]+)"', text)):
        train = f"mean train perplexity {2 ** float(losses[-1]):.2f} in the last epoch"
        yield "Training and test", f"{train}, test perplexity {last.value:.2f}"


class Report:
    """A report on one or more runs that use one kind of data; runs may be incomplete."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = runs
        self.groups = experiments(runs)
        self.tables = all_tables(self.groups)
        self.sentences = [*sentences(self.groups)]
        self.details = [*describe_run(runs[0])] if len(runs) == 1 else []
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
        known = {
            *(f"{name}.{end}" for name in TABLES for end in TEXTS),
            *(f"{FIGURES}/{name}.{end}" for name in DRAWINGS for end in ("png", "pdf")),
        }
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
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader(__package__, ""),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
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


def require_comparable(run: RecordedRun, first: RecordedRun, mix: bool) -> None:
    """Raise AlmaError unless a run is comparable to the first run of the report.

    Args:
        run: run to add to the report.
        first: first run of the report.
        mix: whether to accept runs on other streams of the same kind of data (text or images).
    """
    if run.is_text != first.is_text or not (mix or run.stream_key == first.stream_key):
        of_first, of_run = (f"{s['path']}, fingerprint {s['fingerprint'][:12]}" for s in (first.stream, run.stream))
        mixed = ", or give --mix to compare runs on different streams" if run.is_text == first.is_text else ""
        raise AlmaError(
            f"{run.path}: expected the stream of {first.path} ({of_first}), found {of_run}; report this run "
            f"separately{mixed}"
        )
