"""The tables of the ladder of sizes: what each row came to, ratios beside the paper's, regret, and trends over sizes.

    python recipes/ladder_tables.py                               of the kept records
    python recipes/ladder_tables.py --runs runs/lm-ladder         of these runs and the kept records
    python recipes/ladder_tables.py --figure recipes/figures/ladder.svg     draw ratios, regrets and growth over sizes
    python recipes/ladder_tables.py --frontier recipes/figures/growth_frontier.svg      loss over FLOPs of what grows

Blocks ``<!-- ladder lm-ladder-16 rows -->`` of ``lm/ladder/README.md`` and ``growth/README.md`` (one of TABLES; of any
size also trend, over all sizes; of growth by layers frontier, lead and costs, of growth by widths frontier-width, ...)
are written by ``tables.py``. Ratios and regrets are of test perplexities after the
same arrival, means of logarithms over the seeds that both have; intervals: 95 %, Student's t. Of a row that has not
been tried with all rates the best of those that were counts, and the table says how many.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Hashable, Iterator, Mapping, NamedTuple, Optional, Sequence

import arms
import ladder

from fairseq_alma.cli.entry import command
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.finding import Spread, half_interval, half_width
from fairseq_alma.report.paper import paper_tables
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import render_markdown

LAST = ladder.MEGABATCHES - 1
PAPER_SIZE, PAPER_PARAMS = "base", 65_000_000
PAPER_ROWS = {
    "sm-4": ("SM_w1", "4"), "sm-8": ("SM_w1", "8"), "sm-12": ("SM_w1", "12"), "ens-2": ("Ens_w1", "4@2"),
    "ens-4": ("Ens_w1", "4@4"), "gens": ("gEns_w1", "4@1, 4@2, 4@3, 4@4"), "gmoe-copy": ("gMoE_w1", "4, 6, 8, 12"),
    "sm-8-w3": ("SM_w3", "8"), "sm-8-w3-x3": ("SM_w3 (3x steps)", "8"), "sm-12-w4": ("SM_w4", "12"),
    "sm-12-w4-x4": ("SM_w4 (4x steps)", "12"), "ens-2-w3": ("Ens_w3", "4@2"), "ens-2-w4": ("Ens_w4", "4@2"),
    "ens-2-iid3": ("Ens_w3 (3x steps)", "4@2"), "ens-2-iid4": ("Ens_w4 (4x steps)", "4@2"),
}  # fmt: skip
NO_WORSE = 0.5  # percent of perplexity: what a regret may be
MIN_SIZES = 3  # that a line needs for an interval
NONE_YET = "Of no ratio both rows have ended yet.\n"
CARRIED = ("sm-4", "ema", "ema-union", "wsd-20-union", "wsd-10-union")  # whose regret is followed over sizes
GROWN = ("gmoe-copy", "gmoe-split")


class Family(NamedTuple):
    """What grows, and what has one size.

    Attributes:
        rows: all of them.
        fixed: those that have one size, the largest at the end.
    """

    rows: tuple[str, ...]
    fixed: tuple[str, ...]

    @property
    def largest(self) -> str:
        """The row that has the largest size throughout."""
        return self.fixed[-1]


DEPTH = Family(ladder.SETS["depth"], ladder.FIXED)
WIDTH = Family(ladder.SETS["width"], ladder.FIXED_WIDTHS)
GROWING = {*DEPTH.rows, *WIDTH.rows}  # those have tables of their own


class Ratio(NamedTuple):
    """A claim about two rows at an arrival: falsified where the interval of their ratio lies above ``limit``.

    Without a limit nothing is claimed: the ratio is one of the paper's tables.
    """

    row: str
    of: str
    limit: Optional[float] = 1.0
    arrival: int = LAST

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.row} to {self.of}{'' if self.arrival == LAST else f', t{self.arrival}'}"


RATIOS = (
    Ratio("sm-8", "sm-4"), Ratio("sm-12", "sm-4"), Ratio("gmoe-copy", "sm-4"), Ratio("gmoe-noise", "sm-4"),
    Ratio("gmoe-split", "gmoe-copy"), Ratio("gmoe-renew", "gmoe-copy"), Ratio("gmoe-worst", "gmoe-copy"),
    Ratio("gmoe-early", "gmoe-copy"), Ratio("gmoe-noise", "gmoe-copy"),
    Ratio("gens", "sm-4"), Ratio("gens-last", "sm-4"), Ratio("ens-2", "sm-4"),
    Ratio("ens-4", "sm-4"), Ratio("ens-2", "ens-2-iid3", None, 2), Ratio("ens-2", "ens-2-iid4", 1.05),
    Ratio("sm-4", "sm-4-iid4", 1.05), Ratio("sm-8-w3", "sm-8", None, 2), Ratio("sm-8-w3-x3", "sm-8", None, 2),
    Ratio("sm-12-w4", "sm-12", None), Ratio("sm-12-w4-x4", "sm-12"), Ratio("ens-2-w3", "ens-2", None, 2),
    Ratio("ens-2-w4", "ens-2", None), Ratio("ema-union", "ema"), Ratio("wsd-10", "ema", 1.005),
    Ratio("wsd-20", "ema", 1.005), Ratio("ema-union-wd", "ema-union"),
    Ratio("ema-least-seen", "ema-union", 1.005), Ratio("sqrt-20-union", "wsd-20-union"),
)  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """What the runs of one size came to.

    Attributes:
        done: complete runs, by row, rate and seed.
        bytes_per_token: of the test set.
    """

    done: ladder.Ended
    bytes_per_token: float

    @classmethod
    def of(cls, runs: RunTable) -> "Rung":
        """Read the complete ones of some runs. Raises AlmaError if there are none."""
        complete = runs.where(runs.facts.is_complete)
        if not len(complete.facts):
            raise AlmaError("no run of the ladder is complete; the tables begin with the first that is")
        test = complete.facts.stream.iloc[0]["test"]
        return cls(arms.arms_of(complete), test["num_bytes"] / test["num_tokens"])

    @cached_property
    def tuning_seed(self) -> int:
        """The seed with which rates are chosen."""
        return min(seed for *_, seed in self.done)

    def tried(self, row: str) -> list[str]:
        """Return the rates that a row was tried with."""
        own = ladder.ROWS[row].tuned_as or row
        return sorted({rate for name, rate, seed in self.done if (name, seed) == (own, self.tuning_seed)}, key=float)

    def runs(self, row: str) -> dict[int, arms.Run]:
        """Return the runs of a row with its best rate, by their seeds."""
        own = ladder.ROWS[row].tuned_as or row
        if not self.tried(row):
            return {}
        rate = arms.best_lr(self.done, own, self.tuning_seed)
        return {seed: run for (name, lr, seed), run in self.done.items() if (name, lr) == (row, rate)}

    def rate(self, row: str) -> str:
        """Return the best rate of a row."""
        return arms.best_lr(self.done, ladder.ROWS[row].tuned_as or row, self.tuning_seed)

    def tuning(self, row: str) -> list[str]:
        """Return a row's cells of its best rate and of how many were tried.

        One that is the lowest or highest of those tried says so: a further one might be better.
        """
        best, tried = self.rate(row), self.tried(row)
        edge = {tried[0]: " (lowest)", tried[-1]: " (highest)"} if len(tried) > 1 else {}
        return [best + edge.get(best, ""), str(len(tried))]

    def gap(self, row: str, of: str, arrival: int = LAST) -> Optional[Spread]:
        """Return how far a row's loss lies above another's at an arrival, nats; None: they share no seed."""
        one, other = self.runs(row), self.runs(of)
        shared = [seed for seed in one if seed in other and arrival in one[seed].test and arrival in other[seed].test]
        return Spread.of({seed: one[seed].test[arrival] - other[seed].test[arrival] for seed in shared})

    def oracle(self, arrival: int) -> Optional[str]:
        """Return the best way, by valid, to retrain on all that has arrived."""
        names = [name for name in (f"{way}{arrival + 1}" for way in ladder.RETRAINED) if self.runs(name)]
        return min(names, key=lambda name: self.runs(name)[self.tuning_seed].valid[arrival], default=None)

    def regret(self, row: str) -> Optional[Spread]:
        """Return how far a row's final loss lies above that of the best retraining on everything, nats."""
        oracle = self.oracle(LAST)
        return None if oracle is None else self.gap(row, oracle)

    def way(self, row: str, to: str = "sm-12") -> Optional[Spread]:
        """Return which share of the way from ``sm-4`` to another row a row covers, in final losses.

        A ratio of two means; by seed its influence on that (the delta method), so that both have their share in the
        deviation. None: a row is missing, or the other is no better than ``sm-4``.
        """
        closed, whole = self.gap("sm-4", row), self.gap("sm-4", to)
        if closed is None or whole is None:
            return None
        seeds = [seed for seed in closed.by_seed if seed in whole.by_seed]
        length = fmean(whole.by_seed[seed] for seed in seeds) if seeds else 0.0
        if length <= 0:
            return None
        share = fmean(closed.by_seed[seed] for seed in seeds) / length
        return Spread.of(
            {seed: share + (closed.by_seed[seed] - share * whole.by_seed[seed]) / length for seed in seeds}
        )

    @cached_property
    def num_params(self) -> float:
        """Parameters of the single model with 4 experts, or of the smallest that there is."""
        return min(min(run.params.values()) for (row, *_), run in self.done.items() if row not in GROWING)

    def hours(self, row: str) -> float:
        """Return the hours of a core that a row took with all rates and seeds.

        Seeds that were trained side by side have the same seconds, those of all of them, which count once.
        """
        stages = {
            (rate, arrival, seconds)
            for (name, rate, _), run in self.done.items()
            if name == row
            for arrival, seconds in run.seconds.items()
        }
        return sum(seconds for *_, seconds in stages) / 3600

    def whole(self, row: str) -> dict[int, arms.Run]:
        """Return the runs of a row with its best rate that have been tested after every arrival."""
        return {seed: run for seed, run in self.runs(row).items() if len(run.test) == ladder.MEGABATCHES}

    def spent(self, row: str, cost: Callable[[arms.Run, int], float]) -> list[float]:
        """Return what a row has cost after each arrival, in all: of each stage the least that a seed needed for it."""
        runs = self.whole(row).values()
        return list(accumulate(min(cost(run, arrival) for run in runs) for arrival in range(ladder.MEGABATCHES)))


def rows_table(rung: Rung) -> str:
    """Lay out what each row came to: perplexities by arrival, how far from converged it began, bits per byte, hours."""
    titles = [f"t{arrival}" for arrival in range(ladder.MEGABATCHES)]
    header = ["row", "rate", "rates tried", "seeds", *titles, "t3/t0", "bits per byte", "core hours"]
    lines = []
    for row in ladder.ROWS:
        if row in GROWING or not (runs := rung.runs(row)):
            continue
        ppl = [
            Spread.of({seed: math.exp(run.test[arrival]) for seed, run in runs.items() if arrival in run.test})
            for arrival in range(ladder.MEGABATCHES)
        ]
        settled = f"{ppl[-1].mean / ppl[0].mean:.3f}" if ppl[0] and ppl[-1] else "–"
        bits = [max(run.test.items())[1] / math.log(2) / rung.bytes_per_token for run in runs.values()]
        cells = [row, *rung.tuning(row), str(len(runs))]
        cells += [each.show(2) if each else "*" for each in ppl]
        lines.append([*cells, settled, f"{fmean(bits):.3f}", f"{rung.hours(row):.2f}"])
    return render_markdown(header, lines)


def show_interval(value: Spread, spell: Callable[[float], str]) -> str:
    """Spell a value with its interval, which one seed has not."""
    half = half_width(value)
    mean = spell(value.mean)
    return mean if half is None else f"{mean} [{spell(value.mean - half)}, {spell(value.mean + half)}]"


def show_ratio(log: float) -> str:
    """Spell the ratio of two perplexities of which this is the logarithm."""
    return f"{math.exp(log):.3f}"


def verdict(gap: Spread, limit: Optional[float]) -> str:
    """Say whether a ratio's interval lies below the limit (held), above (falsified), or on both sides."""
    if limit is None:
        return "no claim"
    half = half_width(gap)
    if half is None:
        return f"one seed ({limit:g})"
    above, below = gap.mean - half > math.log(limit), gap.mean + half < math.log(limit)
    return f"{'falsified' if above else 'held' if below else 'not decided'} ({limit:g})"


def paper_ratio(ratio: Ratio) -> Optional[float]:
    """Return the ratio of the paper's base models at that arrival; None: the paper does not have both."""
    if not {ratio.row, ratio.of} <= PAPER_ROWS.keys():
        return None
    table = {(row.learner, row.experts): row.ppl for row in paper_tables().table2 if row.size == PAPER_SIZE}
    one, other = (table[PAPER_ROWS[row]][ratio.arrival] for row in (ratio.row, ratio.of))
    assert one is not None and other is not None
    return one / other


def ratios_table(rung: Rung) -> str:
    """Lay out the ratios of the claims beside the paper's."""
    header = [
        "ratio, at t3 or as named",
        "paper, base",
        "here, 95 %",
        "seeds",
        "verdict (not above)",
    ]
    lines = []
    for ratio in RATIOS:
        gap = rung.gap(ratio.row, ratio.of, ratio.arrival)
        if gap is not None:
            paper = paper_ratio(ratio)
            shown = [f"{paper:.3f}" if paper else "–", show_interval(gap, show_ratio), str(gap.num_seeds)]
            lines.append([ratio.name, *shown, verdict(gap, ratio.limit)])
    return render_markdown(header, lines) if lines else NONE_YET


def regret_table(rung: Rung) -> str:
    """Lay out how far, in percent of perplexity, sequential rows are behind the best retraining at each arrival.

    Beside it which share of the last regret of ``sm-4``, the paper's way, a row closes.
    """
    arrivals = range(1, ladder.MEGABATCHES)
    oracles = {arrival: name for arrival in arrivals if (name := rung.oracle(arrival))}
    columns = [f"t{arrival} (against {name})" for arrival, name in oracles.items()]
    header = ["regret, %", *columns, f"share of sm-4's at t{LAST} that is closed"]
    lines = []
    for row in ladder.ROWS:
        if (
            "-iid" in row
            or not (row.startswith(("ema", "wsd", "sqrt")) or row in ("sm-4", "sm-4-wd"))
            or not rung.runs(row)
        ):
            continue
        gaps = [rung.gap(row, name, arrival) for arrival, name in oracles.items()]
        closed = rung.way(row, oracles[LAST]) if LAST in oracles and row != "sm-4" else None
        share = "–" if closed is None else show_interval(closed, "{:.2f}".format)
        lines.append([row, *(_show_regret(gap) for gap in gaps), share])
    return render_markdown(header, lines) if oracles else NONE_YET


def _show_regret(gap: Optional[Spread]) -> str:
    if gap is None:
        return "–"
    half, limit = half_width(gap), math.log1p(NO_WORSE / 100)
    if half is None:
        return f"{100 * math.expm1(gap.mean):+.2f} (one seed)"
    is_held, is_falsified = gap.mean + half <= limit, gap.mean - half > limit
    said = "held" if is_held else "falsified" if is_falsified else "not decided"
    return f"{100 * math.expm1(gap.mean):+.2f} ± {100 * half:.2f} ({said})"


class Line(NamedTuple):
    """A line by least squares: slope, value at a place, and half of the 95 % interval of a new value there, or None."""

    slope: float
    value: float
    half: Optional[float]


def fit(points: Sequence[tuple[float, float]], place: float) -> Optional[Line]:
    """Fit a line and follow it to a place; None: fewer than two points. Two have a line, but no interval."""
    if len(points) < 2:
        return None
    xs, ys = zip(*points, strict=True)
    mean = fmean(xs)
    spread = sum((x - mean) ** 2 for x in xs)
    slope, intercept = statistics.linear_regression(xs, ys)
    value = intercept + slope * place
    if len(points) < MIN_SIZES:
        return Line(slope, value, None)
    freedom = len(points) - 2
    error = math.sqrt(sum((y - intercept - slope * x) ** 2 for x, y in points) / freedom)
    student = half_interval(math.sqrt(freedom + 1), freedom + 1)
    return Line(slope, value, student * error * math.sqrt(1 + 1 / len(points) + (place - mean) ** 2 / spread))


@dataclass(frozen=True)
class Quantity:
    """What is followed over sizes.

    Attributes:
        name: of its row.
        at: its value at a size, of a ratio the logarithm; None: the size does not have it.
        paper: the same of the paper.
        is_ratio: of perplexities; else a share.
    """

    name: str
    at: Callable[[Rung], Optional[Spread]]
    paper: Optional[float] = None
    is_ratio: bool = True

    def show(self, value: float) -> str:
        """Spell a value."""
        return show_ratio(value) if self.is_ratio else f"{value:.2f}"

    def height(self, value: float) -> float:
        """Return where a value is drawn."""
        return math.exp(value) if self.is_ratio else value


def ratios(of: Sequence[Ratio] = RATIOS) -> list[Quantity]:
    """Return ratios as what is followed over sizes."""
    papers = [paper_ratio(each) for each in of]
    return [
        Quantity(
            each.name, partial(Rung.gap, row=each.row, of=each.of, arrival=each.arrival), paper and math.log(paper)
        )
        for each, paper in zip(of, papers, strict=True)
    ]


def regrets() -> list[Quantity]:
    """Return what learning as it arrives costs at the end."""
    return [Quantity(f"{row} to the best retraining", partial(Rung.regret, row=row)) for row in CARRIED]


def ways() -> list[Quantity]:
    """Return which share of the way from 4 to 12 experts growing covers; of the paper's tables by copies."""
    copies, experts = (paper_ratio(Ratio(row, "sm-4")) for row in ("gmoe-copy", "sm-12"))
    assert copies is not None and experts is not None
    papers = {"gmoe-copy": math.log(copies) / math.log(experts)}
    return [
        Quantity(f"way from 4 to 12 experts: {row}", partial(Rung.way, row=row), papers.get(row), is_ratio=False)
        for row in GROWN
    ]


def over_sizes(
    rungs: Mapping[int, Rung], quantities: Sequence[Quantity], least: int = 2
) -> list[tuple[Quantity, dict[int, Spread]]]:
    """Return the quantities that ``least`` sizes or more have, with their values by the widths that have them."""
    values = [{width: each.at(rung) for width, rung in sorted(rungs.items())} for each in quantities]
    there = [{width: value for width, value in each.items() if value is not None} for each in values]
    return [(each, found) for each, found in zip(quantities, there, strict=True) if len(found) >= least]


def trend_table(rungs: Mapping[int, Rung]) -> str:
    """Lay out each quantity over sizes, the line through them, and what it predicts for the paper's size."""
    quantities = [*ratios(), *regrets(), *ways()]
    followed = over_sizes(rungs, quantities) or over_sizes(rungs, quantities, least=1)
    widths = sorted({width for _, values in followed for width in values})
    header = ["", *(f"width {width}" for width in widths), "for ten times the size", "predicted, 65 M", "paper"]
    lines = []
    for each, values in followed:
        points = [(math.log(rungs[width].num_params), value.mean) for width, value in values.items()]
        cells = [show_interval(values[width], each.show) if width in values else "–" for width in widths]
        cells += _show_line(fit(points, math.log(PAPER_PARAMS)), each)
        lines.append([each.name, *cells, "–" if each.paper is None else each.show(each.paper)])
    return render_markdown(header, lines) if lines else NONE_YET


def _show_line(line: Optional[Line], of: Quantity) -> list[str]:
    if line is None:
        return ["one size", "–"]
    rise = line.slope * math.log(10)
    slope = f"x {math.exp(rise):.3f}" if of.is_ratio else f"{rise:+.2f}"
    value = of.show(line.value)
    if line.half is None:
        return [slope, f"{value}, two sizes: no interval"]
    low, high = line.value - line.half, line.value + line.half
    said = "" if of.paper is None else f", the paper's is {'' if low <= of.paper <= high else 'not '}in it"
    return [slope, f"{value} [{of.show(low)}, {of.show(high)}]{said}"]


def draw(rungs: Mapping[int, Rung], path: Path) -> None:
    """Draw claims over sizes, beside what the paper found; regrets; and how far growing goes.

    Raises:
        AlmaError: nothing is there of two sizes.
    """
    from fairseq_alma.report.figures import style

    panels = {
        "ratio of perplexities (star: the paper's base)": [
            each for each in ratios([claim for claim in RATIOS if claim.limit]) if each.paper is not None
        ],
        "perplexity to that of the best retraining": regrets(),
        "share of the way from 4 to 12 experts": ways(),
    }
    shown = {title: followed for title, of in panels.items() if (followed := over_sizes(rungs, of))}
    if not shown:
        raise AlmaError(
            f"--figure {path}: rows of two sizes or more are needed for a trend; there are {len(rungs)} sizes"
        )
    with style.drawn(path, 4.5 * len(shown), 4) as figure:
        places = figure.subplots(1, len(shown), squeeze=False)
        for axes, (title, followed) in zip(places[0], shown.items(), strict=True):
            for number, (each, values) in enumerate(followed):
                _draw_quantity(axes, rungs, each, values, f"C{number}")
            axes.axhline(followed[0][0].height(0.0), color="0.5", linewidth=0.8)  # no difference; none of the way
            sizes = [rungs[width].num_params for _, values in followed for width in values]
            sizes += [PAPER_PARAMS for each, _ in followed if each.paper is not None]
            style.logarithmic(axes.xaxis, sizes)
            axes.set(xlabel="parameters with 4 experts", ylabel=title)
            axes.legend()


def _draw_quantity(
    axes: Any, rungs: Mapping[int, Rung], quantity: Quantity, values: Mapping[int, Spread], colour: str
) -> None:
    """Draw means over sizes with their intervals, and the paper's value as a star at its size."""
    low, middle, high = (
        [quantity.height(value.mean + side * (half_width(value) or 0.0)) for value in values.values()]
        for side in (-1, 0, 1)
    )
    errors = [[abs(end - mean) for end, mean in zip(ends, middle, strict=True)] for ends in (low, high)]
    sizes = [rungs[width].num_params for width in values]
    axes.errorbar(sizes, middle, errors, marker="o", capsize=3, label=quantity.name, color=colour)
    if quantity.paper is not None:
        axes.plot(PAPER_PARAMS, quantity.height(quantity.paper), marker="*", markersize=11, color=colour)


COSTS: dict[str, Callable[[arms.Run, int], float]] = {
    "FLOPs": lambda run, arrival: run.flops[arrival],
    "memory x time": lambda run, arrival: run.params[arrival] * run.seconds[arrival],
    "seconds": lambda run, arrival: run.seconds[arrival],
}
"""What a stage costs. Memory: parameters, of which all that training holds is a multiple. Seconds are those of the
machines that the seeds ran on, one core each, tests too; of what was trained side by side those of all."""


def frontier(run: arms.Run, spent: Optional[Sequence[float]] = None) -> list[tuple[float, float]]:
    """Return what has been spent (default: training FLOPs) and the loss on test, nats, after each arrival."""
    arrivals = sorted(run.test)
    spent = spent or list(accumulate(run.flops[arrival] for arrival in arrivals))
    return list(zip(spent, (run.test[arrival] for arrival in arrivals), strict=True))


def loss_at(points: Sequence[tuple[float, float]], flops: float) -> Optional[float]:
    """Return the loss of a run at so many FLOPs, along the logarithm of FLOPs between arrivals; None: beyond these."""
    for (low, before), (high, after) in pairwise(points):
        if low <= flops <= high:
            return before + (after - before) * math.log(flops / low) / math.log(high / low)
    return None


def frontier_table(rung: Rung, family: Family = DEPTH) -> str:
    """Lay out loss over cumulative FLOPs of what has one size and of what grows, and the area under it."""
    largest = rung.runs(family.largest)
    header = ["row", "rate", "rates tried", "seeds", "FLOPs, of the largest's"]
    header += [f"t{arrival}: FLOPs, loss" for arrival in range(ladder.MEGABATCHES)]
    header += ["final loss, of the largest's", "area less the largest's, nats"]
    lines = []
    for row in family.rows:
        if not (runs := rung.whole(row)):
            continue
        points = [frontier(run) for run in runs.values()]
        shown = [f"{fmean(p[t][0] for p in points):.2e}, {fmean(p[t][1] for p in points):.4f}" for t in range(LAST + 1)]
        paired = {seed: (frontier(run), frontier(largest[seed])) for seed, run in runs.items() if seed in largest}
        shares = [own[-1][0] / other[-1][0] for own, other in paired.values()]
        final = Spread.of({seed: 100 * (own[-1][1] / other[-1][1] - 1) for seed, (own, other) in paired.items()})
        areas: dict[Hashable, Optional[float]] = {seed: area_between(*pair) for seed, pair in paired.items()}
        cells = [f"{100 * fmean(shares):.0f} %" if shares else "–", *shown]
        cells += [_show_gap(final, 2, " %"), _show_gap(Spread.of(areas), 4)]
        lines.append([row, *rung.tuning(row), str(len(runs)), *cells])
    return render_markdown(header, lines) if lines else NONE_YET


def costs_table(rung: Rung, family: Family = DEPTH) -> str:
    """Lay out what each row costs in all and the area under its loss, less the largest's, over each kind of cost."""
    largest = rung.whole(family.largest)
    header = ["row", "seeds", *(title for kind in COSTS for title in (f"{kind}, of the largest's", "area, nats"))]
    lines = []
    for row in family.rows:
        runs = rung.whole(row)
        shared = [seed for seed in runs if seed in largest]
        if row == family.largest or not shared:
            continue
        cells = []
        for cost in COSTS.values():
            own, other = rung.spent(row, cost), rung.spent(family.largest, cost)
            areas: dict[Hashable, Optional[float]] = {
                seed: area_between(frontier(runs[seed], own), frontier(largest[seed], other)) for seed in shared
            }
            cells += [f"{100 * own[-1] / other[-1]:.0f} %", _show_gap(Spread.of(areas), 4)]
        lines.append([row, str(len(shared)), *cells])
    return render_markdown(header, lines) if lines else NONE_YET


def area_between(points: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Optional[float]:
    """Return the mean of a loss less another one at equal FLOPs, nats, over the logarithm of the FLOPs both have.

    None: there are none that both have.
    """
    low, high = max(points[0][0], other[0][0]), min(points[-1][0], other[-1][0])
    if low >= high:
        return None
    places = sorted({low, high, *(flops for flops, _ in (*points, *other) if low < flops < high)})
    gaps = [(math.log(place), _loss(points, place) - _loss(other, place)) for place in places]
    doubled = sum((right - left) * (one + two) for (left, one), (right, two) in pairwise(gaps))
    return doubled / 2 / math.log(high / low)


def _loss(points: Sequence[tuple[float, float]], flops: float) -> float:
    found = loss_at(points, flops)
    assert found is not None  # between its first and last arrival
    return found


def lead_table(rung: Rung, family: Family = DEPTH) -> str:
    """Lay out how far what grows lies above each fixed size at equal FLOPs, nats, after each arrival."""
    header = ["loss at equal FLOPs, nats", "less that of", "seeds", *(f"t{t}" for t in range(1, LAST + 1))]
    lines = []
    for row, fixed in product(family.rows, family.fixed):
        own, other = rung.whole(row), rung.whole(fixed)
        seeds = [seed for seed in own if seed in other]
        if row in family.fixed or not seeds:
            continue
        cells = []
        for arrival in range(1, LAST + 1):
            gaps: dict[Hashable, Optional[float]] = {}
            for seed in seeds:
                flops, loss = frontier(own[seed])[arrival]
                if (there := loss_at(frontier(other[seed]), flops)) is not None:
                    gaps[seed] = loss - there
            cells.append(_show_gap(Spread.of(gaps), 4))
        lines.append([row, fixed, str(len(seeds)), *cells])
    return render_markdown(header, lines) if lines else NONE_YET


def _show_gap(gap: Optional[Spread], digits: int, unit: str = "") -> str:
    if gap is None:
        return "–"
    half = half_width(gap)
    mean = round(gap.mean, digits) + 0.0  # rather than -0.0
    return f"{mean:+.{digits}f}{'' if half is None else f' ± {half:.{digits}f}'}{unit}"


def draw_frontier(rungs: Mapping[int, Rung], path: Path) -> None:
    """Draw loss over cumulative FLOPs, means over seeds, of what has one size (dashed) and of what grows."""
    from fairseq_alma.report.figures import style

    families = (("layers", DEPTH), ("widths", WIDTH))
    shown = [
        (f"{name}, the ladder's width {width}", rung, family)
        for (name, family), (width, rung) in product(families, sorted(rungs.items()))
        if any(rung.whole(row) for row in family.rows)
    ]
    with style.drawn(path, 5 * len(shown), 4) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)
        for axes, (title, rung, family) in zip(panels[0], shown, strict=True):
            spent: list[float] = []
            for row in family.rows:
                if points := [frontier(run) for run in rung.whole(row).values()]:
                    means = [tuple(map(fmean, zip(*arrival, strict=True))) for arrival in zip(*points, strict=True)]
                    label = f"{row} ({len(points)} seed{'s' * (len(points) > 1)})"
                    spent += [flops for arrivals in points for flops, _ in arrivals]
                    axes.plot(*zip(*means, strict=True), "o--" if row in family.fixed else "s-", label=label)
            style.logarithmic(axes.xaxis, spent)
            axes.set(title=title, xlabel="training FLOPs so far", ylabel="loss on test, nats per token")
            axes.legend()


TABLES: dict[str, Callable[[Rung], str]] = {
    "rows": rows_table, "ratios": ratios_table, "regret": regret_table,
    **{
        f"{name}{suffix}": partial(lay_out, family=family)
        for suffix, family in (("", DEPTH), ("-width", WIDTH))
        for name, lay_out in (("frontier", frontier_table), ("lead", lead_table), ("costs", costs_table))
    },
}  # fmt: skip


def rungs_of(folder: Optional[Path] = None) -> dict[int, Rung]:
    """Return the sizes of which there are complete runs, in a folder of the ladder's or kept."""
    found = {}
    for width in ladder.TOKENS_PER_WORD[ladder.WIKIPEDIA]:
        tables = [kept] if (kept := ladder.kept(ladder.Size(width))) is not None else []
        tables += [here] if folder and (here := ladder.complete_runs(folder / str(width))) is not None else []
        if done := ladder.ended(*tables):
            found[width] = Rung(done, Rung.of(tables[-1]).bytes_per_token)
    return found


def _all(rungs: Mapping[int, Rung]) -> Iterator[str]:
    for width, rung in sorted(rungs.items()):
        yield from (f"## width {width}: {name}\n\n{lay_out(rung)}" for name, lay_out in TABLES.items())
    yield f"## trend\n\n{trend_table(rungs)}"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=Path, help="a folder of the ladder's runs (default: the kept records alone)")
    options.add_argument("--figure", type=Path, help="draw ratios, regrets and growth over sizes into this file (.svg)")
    options.add_argument("--frontier", type=Path, help="draw loss over FLOPs of what grows into this file (.svg)")
    args = options.parse_args(argv)
    rungs = rungs_of(args.runs)
    if not rungs:
        raise AlmaError("no run of the ladder is complete; the tables begin with the first that is")
    if args.figure:
        draw(rungs, args.figure)
    if args.frontier:
        draw_frontier(rungs, args.frontier)
    print("\n".join(_all(rungs)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
