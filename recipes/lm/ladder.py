"""Answer the paper's questions for alma_transformer_lm with the paper's ratios of data to parameters, at two sizes.

    python recipes/lm/ladder.py --text wiki.txt.xz --width 32               # all rows, three seeds
    python recipes/lm/ladder.py --text wiki.txt.xz --width 48 --rows main --seeds 1 2
    python recipes/lm/ladder.py --width 32 48 --tables                      # of complete runs

Models have two layers (except in the rows `layers-*`), the second with experts, and a vocabulary of 32 times the width.
As in the paper, each of the 4 mega-batches has 9 tokens for each parameter of the model with 4 experts. Training takes
10 passes over a mega-batch. Paragraphs are assigned to mega-batches at random. alma-stream chooses the other options.
The command first prints the remaining hours, then trains one run at a time with one thread. Several calls of the same
command share the work; a second call resumes. For each schedule, the row in `TUNED` tries the rate that alma-stream
chooses and twice that rate, with the first seed; all rows with this schedule use the rate with the lower loss on valid.
`QUESTIONS` lists the questions and the result that would falsify each answer.
"""

import argparse
import fcntl
import json
import lzma
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional, Sequence

from pandas import DataFrame

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.read_run import RecordedRun, Spread, load_run
from fairseq_alma.terminal import command
from fairseq_alma.text.train_options import row_of, transformer_params, usual_ffn, usual_heads

TOKENS_PER_PARAMETER, PASSES, MEGABATCHES, EXPERTS = 9, 10, 4, 4
BATCH, SAMPLE = 16, 128
LAST = MEGABATCHES - 1
Found = dict[str, dict[int, Spread]]  # Log perplexity over seeds, by row and arrival.
BYTES_PER_TOKEN = {32: 2.36, 48: 2.59}  # of English Wikipedia, with the vocabulary for each width
MARGIN = 1.07  # extra text for valid, test, and documents that share words with them
SECONDS_PER_UPDATE = {32: 0.09, 48: 0.18}  # on one core; replaced by the measured time of complete runs
SHARED = "--carry-optimizer --ema-half-life 1/16"
QUESTIONS = """
(a) More experts: 12, 4 and dense, at equal tokens and time. Falsified if 12 are not below 0.95 of 4 at width 48.
(b) Growth by copies 4, 6, 8, 12: share of the way from 4 to 12 (paper: 44 %). Falsified below 40 %.
(c) Ens 2 and gEns against SM (paper: 0.918 and 0.943). Falsified if Ens 2 is not below SM.
(d) A new schedule and optimizer in each stage (sm-4) against i.i.d. Falsified if the last regret is below 1 %.
(e) Carried optimizer, with an average or a branch, with and without replay, against the best of three retrainings.
    Falsified if the interval of carried-replay-branch at the last arrival reaches above 1.5 % (goal: 0.5 %).
(f) Layers 1, 2, 4, 4 by zero outputs against 1, 2 and 4 throughout, over FLOPs and time. Falsified if it ends behind 2
    layers, or behind 4 at more than their FLOPs.
(g) A dense model that gets 8 experts half-way. Falsified below half of the way from dense to 8 throughout.
"""


@dataclass(frozen=True)
class Row:
    """Options of alma-stream, numbers of experts and layers (None: set by the learner), and the learning-rate schedule.

    ``cost``: updates of the complete run, in units of one mega-batch of a model with two layers.
    """

    options: str = "--learner sm"
    experts: Optional[int] = EXPERTS
    layers: Optional[int] = 2
    schedule: str = "polynomial_decay"
    cost: float = MEGABATCHES


def retraining(how: str, options: str, schedule: str) -> dict[str, Row]:
    """Return the control rows: i.i.d. training on the first 2, 3 and 4 mega-batches."""
    return {f"{how}-iid{k}": Row(f"--learner sm --iid {k} {options}", schedule=schedule, cost=k) for k in (2, 3, 4)}


ROWS = {
    "sm-4": Row(), "sm-1": Row(experts=1), "sm-12": Row(experts=12), "sm-8": Row(experts=8),
    "gmoe": Row("--learner gmoe --grow-schedule 4,6,8,12 --grow-method copy", None),
    "ens-2": Row("--learner ens --num-members 2", cost=8), "gens": Row("--learner gens"),
    **retraining("linear", "", "polynomial_decay"),
    **retraining("wsd", "--branch-share 0.2", "fixed"),
    **retraining("average", "--ema-half-life 1/16", "fixed"),
    "carried": Row(f"--learner sm {SHARED}", schedule="fixed"),
    "carried-replay": Row(f"--learner sm {SHARED} --replay", schedule="fixed"),
    "carried-branch": Row("--learner sm --carry-optimizer --branch-share 0.1", schedule="fixed", cost=4.4),
    "carried-replay-branch": Row(
        "--learner sm --carry-optimizer --branch-share 0.1 --replay", schedule="fixed", cost=4.4
    ),
    "layers-1": Row(experts=1, layers=1, cost=2.5), "layers-4": Row(experts=1, layers=4, cost=7),
    "layers-1-2-4": Row("--learner grow --grow-schedule layers=1,2,4,4", 1, None, cost=5),
    "upcycled-8": Row("--learner grow --grow-schedule experts=1,1,8,8 --grow-method copy", None),
}  # fmt: skip
# Row that tries two rates, by learning-rate schedule.
TUNED = {"polynomial_decay": "sm-4", "fixed": "carried-replay-branch"}
MAIN = ("sm-4", "sm-1", "sm-12", "gmoe", "ens-2", "carried-replay-branch")
PAPER = {
    "sm-8": ("SM_w1", "8"), "sm-12": ("SM_w1", "12"), "gmoe": ("gMoE_w1", "4, 6, 8, 12"), "ens-2": ("Ens_w1", "4@2"),
    "gens": ("gEns_w1", "4@1, 4@2, 4@3, 4@4"),
}  # fmt: skip
SEQUENTIAL = ("sm-4", "carried", "carried-replay", "carried-branch", "carried-replay-branch")


@dataclass(frozen=True)
class Rung:
    """One size of the ladder, with the folder for the stream and the runs of this size."""

    width: int
    root: Path
    passes: float

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a mega-batch."""
        heads = usual_heads(self.width)
        sizes = (self.width, usual_ffn(self.width), 2, (heads, heads, self.width // heads), 32 * self.width + 4)
        return TOKENS_PER_PARAMETER * transformer_params(*sizes, (EXPERTS,))

    @property
    def bytes_needed(self) -> int:
        """Return the bytes of text that the stream needs."""
        return round(MARGIN * MEGABATCHES * self.tokens * BYTES_PER_TOKEN[self.width])

    @property
    def updates(self) -> int:
        """Return the number of updates for one mega-batch."""
        return round(self.passes * self.tokens / (BATCH * SAMPLE))

    def prepare(self, files: Sequence[Path]) -> None:
        """Write the stream unless it exists; each paragraph of text is a document."""
        if (self.root / "stream" / "stream.json").exists():
            return
        if not files:
            raise AlmaError(f"--text: missing, and {self.root} has no stream; give text files (plain or .xz)")
        size, text = 0, self.root / "text.txt"
        with open(text, "w", encoding="utf-8") as out:
            for line in (each.strip() for file in files for each in open_text(file)):
                if line and size < self.bytes_needed:
                    out.write(f"{line}\n\n")
                    size += len(line.encode()) + 1
        if size < self.bytes_needed:
            text.unlink()
            raise AlmaError(
                f"--text: expected {self.bytes_needed:,} bytes for width {self.width}, found {size:,}; give more files"
            )
        words = [text, "--out", self.root / "stream", "--megabatches", MEGABATCHES, "--vocab-size", 32 * self.width]
        subprocess.run(["alma-prep-text", *map(str, words)], check=True)

    def command(self, row: str, seed: int, rate: str) -> list[str]:
        """Return the alma-stream command of a run."""
        how = ROWS[row]
        words = ["alma-stream", "--stream", self.root / "stream", "--megabatches", MEGABATCHES, "--seed", seed]
        words += [*how.options.split(), "--run", self.run(row, seed, rate)]
        words += ["--", "--arch", "alma_transformer_lm", "--decoder-embed-dim", self.width, "--cpu"]
        words += [] if how.layers is None else ["--decoder-layers", how.layers]
        words += [] if how.experts is None else ["--num-experts", how.experts]
        words += ["--tokens-per-sample", SAMPLE, "--batch-size", BATCH, "--max-update", self.updates]
        words += ["--lr", rate, "--lr-scheduler", how.schedule, "--warmup-updates", max(1, self.updates // 30)]
        words += ["--total-num-update", self.updates] if how.schedule == "polynomial_decay" else []
        return list(map(str, words))

    def run(self, row: str, seed: int, rate: str) -> Path:
        """Return the folder of a run."""
        return self.root / f"{row}-lr{rate}-seed{seed}"

    @property
    def rates(self) -> tuple[str, str]:
        """Return the learning rate that alma-stream chooses for one pass through the stream, and twice that rate."""
        rate = row_of(MEGABATCHES * self.tokens).rate
        return f"{rate:.3g}", f"{2 * rate:.3g}"

    def complete(self, row: str, seed: int, rate: str) -> Optional[RecordedRun]:
        """Return a run, or None if a stage is incomplete."""
        path = self.run(row, seed, rate)
        run = load_run(path) if (path / "run.json").exists() else None
        return run if run is not None and run.is_complete else None

    def best_rate(self, row: str, seed: int) -> Optional[str]:
        """Return the rate with the lower loss on valid for the row's schedule; None until this seed has tried both."""
        tuned = TUNED[ROWS[row].schedule]
        found = {rate: self.complete(tuned, seed, rate) for rate in self.rates}
        ended = {rate: float(run.done.valid.iloc[-1]) for rate, run in found.items() if run is not None}
        return min(ended, key=lambda rate: ended[rate]) if len(ended) == len(found) else None

    def jobs(self, rows: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int, str]]:
        """Yield row, seed and rate of incomplete runs; the rows of a schedule follow when its rate is known."""
        best = {row: self.best_rate(row, seeds[0]) for row in rows}
        todo = [(TUNED[ROWS[row].schedule], seeds[0], rate) for row in rows for rate in self.rates]
        todo += [(row, seed, rate) for seed in seeds for row, rate in best.items() if rate is not None]
        return (job for job in dict.fromkeys(todo) if self.complete(*job) is None)

    def hours(self, rows: Sequence[str], seeds: Sequence[int]) -> float:
        """Return an estimate of the remaining hours on one core."""
        known = [run.done for path in self.root.glob("sm-4-*-seed?") if (run := load_run(path)).is_complete]
        measured = [float(done.wall_seconds.sum() / done.num_updates.sum()) for done in known]
        seconds = self.updates * min(measured, default=SECONDS_PER_UPDATE[self.width])
        left = [row for row, *_ in self.jobs(rows, seeds)]
        left += [row for row in rows if self.best_rate(row, seeds[0]) is None for _ in seeds]
        return sum(ROWS[row].cost * seconds for row in left) / 3600


def open_text(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or .xz."""
    if not file.is_file():
        raise AlmaError(f"--text {file}: no such file; give another path")
    try:
        with lzma.open(file, "rt", encoding="utf-8") if file.suffix == ".xz" else open(file, encoding="utf-8") as lines:
            yield from lines
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise AlmaError(f"--text {file}: expected UTF-8 text, plain or .xz ({error}); give another file") from error


def train(rung: Rung, rows: Sequence[str], seeds: Sequence[int]) -> None:
    """Train the remaining runs that no other process trains; a failure ends the command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while jobs := list(rung.jobs(rows, seeds)):
        for job in jobs:
            name = str(rung.run(*job))
            with open(f"{name}.lock", "w") as lock, open(f"{name}.log", "a") as log:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if rung.complete(*job) is None:
                    print(name, flush=True)
                    if subprocess.run(rung.command(*job), stdout=log, stderr=log, env=environment).returncode:
                        raise AlmaError(f"{name}: alma-stream failed; see {name}.log")
                break
        else:
            time.sleep(20)  # other processes train the remaining runs


def spreads(rung: Rung, rows: Sequence[str], seeds: Sequence[int]) -> Found:
    """Return the log perplexity by row and arrival, over the seeds with a complete run at the row's best rate."""
    found: Found = {}
    for row in rows:
        rate = rung.best_rate(row, seeds[0])
        runs = {seed: run for seed in seeds if rate is not None and (run := rung.complete(row, seed, rate)) is not None}
        for arrival in {arrival for run in runs.values() for arrival in run.done.index}:
            values = {seed: math.log(run.done.value[arrival]) for seed, run in runs.items()}
            found.setdefault(row, {})[arrival] = Spread.of(values) or Spread(math.nan, math.nan, {})
    return found


def gap(found: Found, row: str, other: str, arrival: int) -> Optional[Spread]:
    """Return the difference of two rows' log perplexities at an arrival over shared seeds, or None."""
    one, two = found.get(row, {}).get(arrival), found.get(other, {}).get(arrival)
    return None if one is None or two is None else one.minus(two)


def show(difference: Optional[Spread], digits: int, percent: bool = False) -> str:
    """Format a ratio of perplexities, or its excess over 1 in percent, with half of its 95 % interval."""
    if difference is None:
        return "–"
    mean, half, scale = math.exp(difference.mean), difference.half_interval(), 100 if percent else 1
    shown = f"{scale * (mean - 1):+.{digits}f}" if percent else f"{mean:.{digits}f}"
    return shown + ("" if math.isnan(half) else f" ± {scale * mean * half:.{digits}f}")


def ratio_table(found: Found) -> DataFrame:
    """Return a table of final perplexities and their ratios to SM with 4 experts, here and in the paper."""
    lines = {}
    for row, arrivals in found.items():
        if LAST in arrivals:
            paper = f"{paper_ratio(row):.3f}" if row in PAPER else "–"
            ppl, seeds = f"{math.exp(arrivals[LAST].mean):.2f}", len(arrivals[LAST].by_seed)
            lines[row] = (ppl, show(gap(found, row, "sm-4", LAST), 3), paper, seeds)
    return DataFrame.from_dict(lines, orient="index", columns=["final PPL", "of sm-4", "paper", "seeds"])


def paper_ratio(row: str) -> float:
    """Return the final perplexity of a row of Table 2 (base) divided by that of SM with 4 experts."""
    tables = json.loads((Path(__file__).parents[1] / "records/paper_tables.json").read_text())
    base = [each for each in tables["table2"] if each["size"] == "base"]
    theirs = {(each["learner"], each["experts"]): [ppl for ppl in each["ppl"] if ppl][-1] for each in base}
    return theirs[PAPER[row]] / theirs["SM_w1", "4"]


def best_control(found: Found, arrival: int) -> str:
    """Return the name of the retraining with the lowest loss after an arrival, or an empty string."""
    names = [f"{how}-iid{arrival + 1}" for how in ("linear", "wsd", "average")]
    known = [name for name in names if arrival in found.get(name, {})]
    return min(known, key=lambda name: found[name][arrival].mean, default="")


def regret_table(found: Found) -> DataFrame:
    """Return a table of the regret against the best retraining at each arrival, in percent."""
    lines = {
        row: {f"t{t}": show(gap(found, row, best_control(found, t), t), 2, True) for t in range(1, MEGABATCHES)}
        for row in SEQUENTIAL
        if row in found
    }
    return DataFrame.from_dict(lines, orient="index")


def share_of_way(found: Found, begin: str, grown: str, end: str) -> str:
    """Return the share of the final difference in log perplexity between two models that growth covers."""
    if not all(LAST in found.get(row, {}) for row in (begin, grown, end)):
        return "–"
    a, b, c = (found[row][LAST].mean for row in (begin, grown, end))
    return f"{100 * (a - b) / (a - c):.0f} %" if a > c else "–"


def markdown(frame: DataFrame) -> str:
    """Format a table as Markdown."""
    lines = [["row", *frame.columns], ["---"] * (len(frame.columns) + 1)]
    lines += [
        [str(name), *map(str, values)] for name, values in zip(frame.index, frame.fillna("–").to_numpy(), strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(rungs: Sequence[Rung], seeds: Sequence[int]) -> str:
    """Return the questions and the tables of all sizes."""
    parts = [QUESTIONS.strip()]
    found = {rung.width: spreads(rung, list(ROWS), seeds) for rung in rungs}
    for width, rows in found.items():
        parts += [
            f"## Width {width}",
            markdown(ratio_table(rows)),
            "Regret against the best retraining, in percent:",
            markdown(regret_table(rows)),
            f"Copies 4, 6, 8, 12 cover {share_of_way(rows, 'sm-4', 'gmoe', 'sm-12')} of the way.",
            f"8 experts half-way cover {share_of_way(rows, 'sm-1', 'upcycled-8', 'sm-8')} of the way from dense.",
        ]
    return "\n\n".join(parts)


def draw(rungs: Sequence[Rung], seeds: Sequence[int], out: Path) -> None:
    """Draw the ratios of all sizes next to the paper's, and the regret over arrivals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([*PAPER], [paper_ratio(row) for row in PAPER], "k*", label="paper (base)")
    for rung in rungs:
        found = spreads(rung, list(ROWS), seeds)
        ends = {row: each for row in PAPER if (each := gap(found, row, "sm-4", LAST)) is not None}
        bars = [math.exp(each.mean) * each.half_interval() for each in ends.values()]
        ratios = [math.exp(each.mean) for each in ends.values()]
        left.errorbar([*ends], ratios, yerr=bars, fmt="o", label=f"width {rung.width}")
        for row in SEQUENTIAL:
            pairs = {t: each for t in (1, 2, 3) if (each := gap(found, row, best_control(found, t), t)) is not None}
            regrets = [100 * math.expm1(each.mean) for each in pairs.values()]
            right.plot([t + 1 for t in pairs], regrets, "o-", label=f"{row}, width {rung.width}")
    left.set(ylabel="final perplexity, ratio to sm-4")
    right.set(xlabel="arrival", xticks=(2, 3, 4), ylabel="regret against the best retraining (%)")
    for axes in (left, right):
        axes.legend(fontsize=6)
    figure.savefig(out)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--width", type=int, nargs="+", choices=tuple(BYTES_PER_TOKEN), default=[32], help="widths (default: 32)")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="text or .xz files, one paragraph per line")
    add("--runs", type=Path, default=Path("runs/ladder"), metavar="DIR", help="output folder (default: %(default)s)")
    add("--rows", nargs="+", default=["all"], choices=("all", "main", *ROWS), metavar="ROW", help="rows (default: all)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="random seeds (default: 1 2 3)")
    add("--passes", type=float, default=PASSES, help="passes over each mega-batch (default: %(default)s)")
    add("--dry-run", action="store_true", help="print hours and commands; run nothing")
    add("--tables", action="store_true", help="print tables of complete runs and draw the figure; train nothing")
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Train the remaining runs, print the tables and draw the figure."""
    parser = options()
    args = parser.parse_args(argv)
    if args.passes <= 0:
        parser.error(f"--passes {args.passes:g}: expected a number above 0")
    groups: dict[str, Sequence[str]] = {"all": list(ROWS), "main": MAIN}
    rows = list(dict.fromkeys(row for name in args.rows for row in groups.get(name, [name])))
    rungs = [Rung(width, args.runs / f"{width}-{args.passes:g}-passes", args.passes) for width in args.width]
    for rung in rungs if not args.tables else ():
        hours = f"{rung.hours(rows, args.seeds):.1f} hours of one core remain"
        print(f"width {rung.width}: {rung.tokens:,} tokens and {rung.updates:,} updates for each mega-batch; {hours}")
        if args.dry_run:
            for row, seed, rate in rung.jobs(rows, args.seeds):
                print(" ".join(rung.command(row, seed, rate)))
            continue
        rung.root.mkdir(parents=True, exist_ok=True)
        with open(rung.root / "stream.lock", "w") as lock:  # another call may write the stream
            fcntl.flock(lock, fcntl.LOCK_EX)
            rung.prepare(args.text)
        train(rung, rows, args.seeds)
    if not args.dry_run:
        text = report(rungs, args.seeds)
        print(text)
        args.runs.mkdir(parents=True, exist_ok=True)
        (args.runs / "tables.md").write_text(text + "\n", encoding="utf-8")
        draw(rungs, args.seeds, args.runs / "ladder.png")


if __name__ == "__main__":
    sys.exit(main(None))
