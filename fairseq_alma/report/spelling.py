"""How a report spells runs, learners, sizes, numbers and tables, and what it says of tables and figures.

A table has cells as people read them, with what stands behind them, as Markdown, CSV and LaTeX. The sentences stand in
``sentences.toml``.
"""

import functools
import math
import re
import textwrap
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

from pandas import DataFrame

from fairseq_alma.checkpoints.model_options import NETWORK
from fairseq_alma.errors import printable
from fairseq_alma.learners.learner import LEARNERS
from fairseq_alma.learners.presets import PRESETS, Preset, is_same, usual_training
from fairseq_alma.options import flag, options_of
from fairseq_alma.report.finding import Spread
from fairseq_alma.runs.study import FREE_OPTIONS, ROUNDING_OPTIONS

TEXT, IMAGES = "text", "images"
MAX_UPDATE = "--max-update"
# The paper's learners in the order in which they are listed, with the colour that always stands for each.
LEARNER_COLOURS = {
    "sm": "#0072B2", "moe": "#56B4E9", "ens": "#D55E00", "bagging": "#882255", "umix": "#009E73", "gens": "#E69F00",
    "gmoe": "#CC79A7", "firefly": "#333333",
}  # fmt: skip
# Options of fairseq-train that say how large a model is, and how the size of the backbone spells them.
SIZES = {
    "--decoder-layers": "{} layers", "--decoder-embed-dim": "width {}", "--width": "width {}",
    "--channels": "{} channels", "--hidden-layers": "{} hidden layers",
}  # fmt: skip
# Words of an architecture's name that say something about its size, whichever learner it is for.
SIZE_WORDS = ("tiny", "base", "large", "mlp", "vgg")
_NO_VARIANT = ("wait", "replay", "drop_rest", "iid", "grow_schedule", *FREE_OPTIONS, *ROUNDING_OPTIONS)
_IN_ONE_WORD = ("grow_method", "grow_select", "combine", "init")
PLACE_AND_PACE = ("--num-workers", "--cpu")
"""Training options that say where and how fast something runs, not what comes out."""
WAITING, NOT_YET = "*", "–"
MAX_SIZES = 5  # of a model that grows, to be listed


def experiment_key(stream: Mapping[str, Any]) -> list[Any]:
    """Return what two streams share whose results compare.

    Streams of images that differ by their own seed alone (the same images in another order) belong to one experiment;
    of text, only a stream and itself do.
    """
    if stream["kind"] == IMAGES and stream.get("source") is not None:
        return [stream["source"], stream.get("dataset"), stream["num_megabatches"]]
    return [stream["fingerprint"]]


def printable_record(value: Any) -> Any:
    """Spell out what would steer a terminal, or break a line, in all texts of a JSON value."""
    if isinstance(value, dict):
        return {printable(name): printable_record(each) for name, each in value.items()}
    if isinstance(value, list):
        return [printable_record(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def name_of(learner: str, kind: str) -> str:
    """Return what the paper calls a learner: the label that it declares; of one that is not registered its name."""
    known = LEARNERS[kind].get(learner)
    return known.label or learner if known else learner


def label_of(run: Mapping[str, Any]) -> str:
    """Name learner, waiting time, variant and preset, as the paper's tables do: what is not the default is added."""
    name, preset, iid = name_of(run["learner"], run["stream"]["kind"]), preset_of(run), run["options"].get("iid")
    if iid is not None:
        return f"{name} iid k{iid}"
    unusual = _unusual_options(run)
    words = [f"{name}_w{run['options']['wait']}", *(["replay"] if run["options"]["replay"] else [])]
    words += [unusual[each] for each in _IN_ONE_WORD if each in unusual]
    return " ".join([*words, *([f"({preset})"] if preset else [])])


def variant_of(run: Mapping[str, Any]) -> str:
    """Name a learner with its options, whatever the waiting time, replay and the preset: ``Ens vote``."""
    unusual = _unusual_options(run)
    words = [name_of(run["learner"], run["stream"]["kind"])]
    words += [unusual.pop(each) for each in _IN_ONE_WORD if each in unusual]
    return " ".join([*words, *(f"{flag(name)} {value}" for name, value in unusual.items())])


def _unusual_options(run: Mapping[str, Any]) -> dict[str, str]:
    """Return which options of alma-stream are neither the default nor what the preset says."""
    options, learner, kind = run["options"], run["learner"], run["stream"]["kind"]
    known = LEARNERS.get(kind, {}).get(learner)
    usual = {} if known is None else {name: each.default_on(kind) for name, each in options_of(known).items()}
    usual |= {
        "init": usual_init(learner, kind), "grow_method": "copy" if kind == TEXT else "split", "grow_select": "loss",
        "combine": "probabilities",
    }  # fmt: skip
    given, said = _overridden(run), _preset_options(run)
    told_by_preset = [name for name in said if flag(name) not in given]
    return {
        name: str(value) for name, value in options.items()
        if name not in (*_NO_VARIANT, *told_by_preset)
        and (flag(name) in given or not (value in (None, False) or is_same(value, usual.get(name))))
    }  # fmt: skip


def _overridden(run: Mapping[str, Any]) -> list[str]:
    """Return the options in which a run does not go by its preset."""
    return list((run.get("preset") or {}).get("overridden", ()))


def _preset_options(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a run's preset says of its learner's own options; nothing of the paper's, which is the default."""
    known = _known_preset(run)
    return {} if known is None else known.learner_options(run["learner"])


def _known_preset(run: Mapping[str, Any]) -> Optional[Preset]:
    return PRESETS.get(preset_of(run).replace(" ", "-"))


def preset_of(run: Mapping[str, Any]) -> str:
    """Name the preset that a run was made with; empty for the paper's, which is the default."""
    name = str((run.get("preset") or {}).get("name", ""))
    return "" if name == "paper" else name.replace("-", " ")


def setting_of(run: Mapping[str, Any]) -> str:
    """Spell how images are trained on, which learners that are compared must share; empty for the paper's way."""
    if run["stream"]["kind"] == TEXT:
        return ""
    preset, given, options = preset_of(run), _overridden(run) if preset_of(run) else [], run["train_options"]
    arch = str(options.get("--arch", ""))
    known = _known_preset(run)
    said = {} if known is None else known.train_options(run["learner"], arch)
    usual = usual_training(arch) | {name: value for name, value in said.items() if value is not None}
    parts = [flag(name) + f" {run['options'][name]}" for name in _preset_options(run) if flag(name) in given]
    for name, value in options.items():
        is_setting = name not in (*NETWORK, *FREE_OPTIONS, *PLACE_AND_PACE)
        if is_setting and (name in given or not is_same(value, usual.get(name))):
            parts.append(f"{name} {value}")
    return ", ".join([preset, *parts] if preset else parts)


def usual_init(learner: str, kind: str) -> str:
    """Return what a learner's stages begin with unless the user says otherwise; an unknown one: ``previous``."""
    known = LEARNERS.get(kind, {}).get(learner)
    return "previous" if known is None else str(options_of(known)["init"].default_on(kind))


def backbone_of(train_options: Mapping[str, Any]) -> str:
    """Spell the size of the backbone, the same for all learners over it: ``mlp, width 64``; empty if it is not said."""
    words = [word for word in str(train_options.get("--arch", "")).split("_") if word in SIZE_WORDS]
    words += [spelling.format(train_options[name]) for name, spelling in SIZES.items() if train_options.get(name)]
    return ", ".join(words)


def show_params(params: Mapping[int, int]) -> str:
    """Spell the number of parameters; of a learner that grows, the first and the last."""
    if not params:
        return show_count(None)
    first, last = show_count(params[min(params)]), show_count(params[max(params)])
    return last if first == last else f"{first} to {last}"


def show_experts(num_experts: Mapping[int, int], num_members: Mapping[int, int]) -> str:
    """Spell experts as the paper does: ``4``, or two models with 4 each ``4@2``; all sizes in turn.

    Of many sizes the first and the last; of models without experts only their number: ``5 models``.
    """
    several = any(members > 1 for members in num_members.values())
    only_models = several and all(experts == 1 for experts in num_experts.values())
    sizes: list[str] = []
    for arrival, experts in sorted(num_experts.items()):
        size = f"{experts}@{num_members[arrival]}" if several else f"{experts}"
        size = size.removeprefix("1@") if only_models else size
        sizes += [size] if size not in sizes[-1:] else []
    text = ", ".join(sizes) if len(sizes) <= MAX_SIZES else f"{sizes[0]} to {sizes[-1]}"
    return f"{text} models" if only_models else text or "–"


def show_number(value: Optional[float], digits: int) -> str:
    """Spell a number with that many decimals; `WAITING` for None, `NOT_YET` for NaN."""
    return WAITING if value is None else NOT_YET if math.isnan(value) else f"{value:,.{digits}f}"


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


@functools.cache
def _templates() -> Any:
    import jinja2

    entries = tomllib.loads(resources.files(__package__).joinpath("sentences.toml").read_text(encoding="utf-8"))
    texts = {(name, part): " ".join(text.split()) for name, entry in entries.items() for part, text in entry.items()}
    loader = jinja2.DictLoader(
        {name if part == "text" else f"{name}/{part}": text for (name, part), text in texts.items()}
    )
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined)


def said(name: str, /, **facts: Any) -> tuple[str, str]:
    """Return the title of a table or figure, and what is said below it, from what the sentences ask for."""
    title, text = (_templates().get_template(each).render(facts) for each in (f"{name}/title", name))
    return title, text


WIDTH = 120
LATEX_MARKS = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "±": r"$\pm$", "–": "--", "…": r"\dots{}", "×": r"$\times$", "→": r"$\to$", "*": r"$\ast$", "|": r"$|$",
    "θ": r"$\theta$",
}  # fmt: skip


class Cell(NamedTuple):
    """One cell: as it is read, what it is sorted by and marked as best by, whether it is the smallest of its column."""

    text: str
    value: Union[str, int, float, Spread, None] = None
    is_best: bool = False

    @property
    def is_name(self) -> bool:
        """Whether the cell holds a name rather than a number."""
        return isinstance(self.value, str)

    @property
    def number(self) -> Optional[float]:
        """The number behind the cell, or None."""
        value = self.value.mean if isinstance(self.value, Spread) else self.value
        return None if value is None or isinstance(value, str) or math.isnan(value) else float(value)


UNKNOWN = Spread(math.nan, math.nan)
NOTHING = Cell(NOT_YET)


def count_cell(text: str, value: float) -> Cell:
    """Return a cell that holds a whole number, or NaN."""
    return Cell(text, value if math.isnan(value) else int(value))


def number_cell(value: Optional[float], digits: int) -> Cell:
    """Return a cell that shows so many decimals of a number; None: the learner is waiting."""
    return Cell(show_number(value, digits), value)


def spread_cell(spread: Optional[Spread], show: Callable[[Spread], str], missing: str = NOT_YET) -> Cell:
    """Return a cell that shows mean and deviation over seeds in some way, or a text where there are none."""
    return Cell(missing, UNKNOWN) if spread is None else Cell(show(spread), spread)


def interval_cell(gap: Optional[Spread]) -> Cell:
    """Return a cell with the mean of a difference over seeds and half the width of its interval, where it has one."""
    return NOTHING if gap is None else Cell(gap.show_interval(), gap)


def _as_cell(cell: Union[Cell, str]) -> Cell:
    return Cell(cell, cell) if isinstance(cell, str) else cell


@dataclass(frozen=True, eq=False)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: what it shows.
        notes: what the columns mean, one paragraph.
        cells: a `Cell` in each place, or a name; the names of the columns are the header.
        hidden: columns that only programs get.
        plain: the cells for programs, where they are others.
        mean: how programs find the mean of a column with deviations; the deviation has a column of its own.
    """

    name: str
    title: str
    notes: str
    cells: DataFrame
    hidden: Collection[str] = ()
    plain: Optional[DataFrame] = None
    mean: str = "{}"

    @property
    def header(self) -> list[str]:
        """Names of the columns that people are shown."""
        return [title for title in self.cells.columns if title not in self.hidden]

    @property
    def rows(self) -> list[list[Cell]]:
        """The cells that people are shown."""
        shown = self.cells[self.header].to_numpy().tolist() if len(self.cells) else []
        return [list(map(_as_cell, row)) for row in shown]

    def markdown(self) -> str:
        """Return the table as Markdown, the best values in bold, and its notes."""
        return f"{render_markdown(self.header, self.rows)}\n{textwrap.fill(self.notes, WIDTH)}\n"

    def latex(self) -> str:
        """Return the table as a LaTeX ``tabular`` for the package booktabs, the best values in bold."""
        rows = [[rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, _, best in row] for row in self.rows]
        is_left = [all(cell.is_name for cell in self.rows[0][: place + 1]) for place in range(len(self.header))]
        columns = "".join("l" if left else "r" for left in is_left)
        shown = DataFrame(rows, columns=[_latex(title) for title in self.header])
        return shown.to_latex(index=False, escape=False, column_format=columns)

    def csv(self) -> str:
        """Return the table as CSV, numbers in full; a missing value is an empty cell."""
        columns: dict[str, list[Any]] = {}
        for title, cells in (self.cells if self.plain is None else self.plain).items():
            values: list[Any] = [_as_cell(cell).value for cell in cells]
            if any(isinstance(value, Spread) for value in values):
                spreads = [UNKNOWN if value is None else value for value in values]
                columns[self.mean.format(title)] = [spread.mean for spread in spreads]
                columns[f"{title} deviation"] = [spread.deviation for spread in spreads]
            else:
                columns[str(title)] = [inert(value) if isinstance(value, str) else value for value in values]
        return DataFrame(columns, dtype=object).to_csv(index=False, lineterminator="\n")


def inert(text: str) -> str:
    """Keep a name from being read as a formula by a spreadsheet."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def mark_best(rows: Sequence[dict[str, Cell]], titles: Iterable[str]) -> None:
    """Mark the smallest number of each of these columns, where there are at least two; also those spelled the same."""
    for title in titles:
        numbers = [(number, row[title].text) for row in rows if (number := row[title].number) is not None]
        for row in rows if len(numbers) > 1 else ():
            row[title] = row[title]._replace(is_best=row[title].text == min(numbers)[1])


def render_markdown(header: Sequence[str], rows: Iterable[Sequence[Union[Cell, str]]]) -> str:
    """Return an aligned Markdown table: the first column to the left, all others to the right."""
    cells = [list(map(_as_cell, row)) for row in rows]
    shown = [header, *([f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in cells)]
    lines = [[text.replace("|", "\\|") for text in line] for line in shown]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:])] for line in lines]
    rules = ["-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths)]
    head, *body = [f"| {' | '.join(line)} |\n" for line in padded]
    return f"{head}|{'|'.join(rules)}|\n{''.join(body)}"


def _latex(text: str) -> str:
    """Escape what LaTeX reads as a command, and set powers of ten as such."""
    escaped = "".join(LATEX_MARKS.get(mark, mark) for mark in text)
    return re.sub(r"([\d.]+)e\+?(-?)0*(\d+)", r"$\1\\times 10^{\2\3}$", escaped)
