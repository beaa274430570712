"""The tables of the anytime experiments, from runs that are called ARM-lrLR-seedN.

    python recipes/arms.py --runs runs/anytime/single-pass                       the tables
    python recipes/arms.py --runs runs/anytime/single-pass --against ema         differences from another arm
    python recipes/arms.py --runs runs/anytime/single-pass --seeds 6-25          of these seeds alone
    python recipes/arms.py --runs runs/anytime/single-pass --figure recipes/figures/anytime_regret.svg     draw regrets

Of the kept records ``tables.py`` writes them into anytime/README.md: ``<!-- arms NAME OPTION... -->``. ``oracle-kK`` is
retrained on the first K mega-batches. Regret: the loss on test at an arrival minus that of the oracle of the same seed,
in nats per token. Intervals: 95 %, of Student's t over paired seeds. Of a regret the verdict asks whether it is below
1 %, of a difference from another arm whether it is on either side. Compute multiplier: as in alma-report's table of
regrets, the updates with which the oracle reaches the last loss, over those that the arm has made, both as recorded,
from the mean losses over the seeds.
"""

import argparse
import math
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.finding import Spread, half_width
from fairseq_alma.report.read_run import RunTable, read_run
from fairseq_alma.report.tables import MARGIN, compute_multiplier

NAME = re.compile(r"(?P<arm>.+?)(-k(?P<k>\d+))?-lr(?P<lr>[\d.]+)-seed(?P<seed>\d+)")
PAPER = "paper"
FIRST_OF = {"oracle": "paper", "oracle-ema": "ema", "oracle-ema-wd": "ema-wd", "oracle-best-wd": "best-wd"}
"""The oracles -> the arm that is the same training at the first arrival, before which there is nothing to differ by."""
SHOWN = {"paper": "the paper's way", "branch": "carried on, decayed branch", "ema": "carried on, average"}


class Run(NamedTuple):
    """What is known of one arm with one learning rate and seed: by arrival, losses in nats, updates so far, costs."""

    valid: dict[int, float]
    test: dict[int, float]
    updates: dict[int, int]
    flops: dict[int, float]
    params: dict[int, int]
    seconds: dict[int, float]


Key = tuple[str, str, int]  # arm, learning rate, seed


def arms_of(runs: RunTable) -> dict[Key, Run]:
    """Gather runs into arms; an oracle's stages come from one run for each arrival. Raises AlmaError if none are."""
    if runs.facts.empty or not runs.facts.is_text.all():
        raise AlmaError("no runs on text called ARM-lrLR-seedN are there; give the folder that the runs lie in")
    arms: dict[Key, Run] = defaultdict(lambda: Run(*({} for _ in Run._fields)))
    done = runs.arrivals[runs.arrivals.done]
    figures = {"valid": done.valid.map(math.log), "test": done.loss * math.log(2)}
    figures |= {
        "updates": done.groupby("run").num_updates.cumsum(),
        "flops": done.train_flops,
        "params": done.num_params,
    }
    figures |= {"seconds": done.wall_seconds}
    names = runs.facts.path.map(lambda path: NAME.fullmatch(path.name))
    for row, run, arrival in zip(done.index, done.run, done.arrival, strict=True):
        name = names[run]
        if name is None:
            raise AlmaError(f"{runs.facts.path[run]}: not called ARM-lrLR-seedN, so this is the run of no arm")
        arm = arms[name["arm"], name["lr"], int(name["seed"])]
        for field, values in figures.items():
            getattr(arm, field)[arrival] = values[row]
    for (arm_name, lr, seed), arm in list(arms.items()):
        if arm_name in FIRST_OF and 0 not in arm.test and (first := arms.get((FIRST_OF[arm_name], lr, seed))):
            for field in Run._fields:
                getattr(arm, field)[0] = getattr(first, field)[0]
    return dict(arms)


def names_of(arms: dict[Key, Run]) -> list[str]:
    """Return the arms, each with its seeds."""
    seeds: dict[str, set[int]] = defaultdict(set)
    for name, _, seed in sorted(arms):
        seeds[name].add(seed)
    return [f"{name} (seed {' '.join(map(str, sorted(found)))})" for name, found in seeds.items()]


def best_lr(arms: dict[Key, Run], arm: str, seed: int) -> str:
    """Return the learning rate with the lowest loss on valid, its mean over the arrivals."""
    tried = {lr: run.valid.values() for (name, lr, of), run in arms.items() if (name, of) == (arm, seed)}
    if not tried:
        raise AlmaError(
            f"--best-lr {arm}: no stage of this arm has ended with seed {seed}; there are {', '.join(names_of(arms))}"
        )
    furthest = max(map(len, tried.values()))
    return min((lr for lr in tried if len(tried[lr]) == furthest), key=lambda lr: statistics.fmean(tried[lr]))


def _spread(values: Sequence[float]) -> Spread:
    found = Spread.of(dict(enumerate(values)))
    return Spread(math.nan) if found is None else found


def verdict(values: Sequence[float], two_sided: bool) -> str:
    """Say whether a regret is below the margin or above it, a difference within it or beyond, or neither surely."""
    half, mean = half_width(_spread(values)), statistics.fmean(values)
    if half is None:
        return "one seed"
    if mean + half < MARGIN and (not two_sided or mean - half > -MARGIN):
        return "within 1 %"
    if mean - half > MARGIN:
        return "above by more than 1 %" if two_sided else "worse than 1 %"
    return "below by more than 1 %" if two_sided and mean + half < -MARGIN else "not decided"


class Chosen(NamedTuple):
    """The complete runs with each arm's best learning rate, and the oracle that regret counts against."""

    rates: dict[str, str]
    runs: dict[tuple[str, int], Run]
    arrivals: list[int]
    oracle: Optional[str]


def choose(arms: dict[Key, Run], tune_seed: int) -> Chosen:
    """Choose learning rates and the oracle by the losses on valid of one seed."""
    rates = {
        name: best_lr(arms, name, tune_seed) for name in sorted({name for name, _, seed in arms if seed == tune_seed})
    }
    best = {(name, seed): run for (name, lr, seed), run in arms.items() if rates.get(name) == lr}
    arrivals = sorted({arrival for run in best.values() for arrival in run.test})
    runs = {key: run for key, run in best.items() if len(run.test) == len(arrivals)}
    valid = {
        name: statistics.fmean(runs[name, tune_seed].valid.values()) for name in FIRST_OF if (name, tune_seed) in runs
    }
    return Chosen(rates, runs, arrivals, min(valid, key=lambda name: valid[name]) if valid else None)


def left_out(arms: dict[Key, Run], tune_seed: int) -> list[str]:
    """Return the arms, each with its seeds, that no table shows: of unknown rate, or not complete."""
    shown = {name for name, _ in choose(arms, tune_seed).runs}
    return names_of({key: run for key, run in arms.items() if key[0] not in shown})


def tables(arms: dict[Key, Run], tune_seed: int, against: Optional[str] = None, two_sided: bool = False) -> str:
    """Write all tables in Markdown; regret against the oracle, or differences from another arm."""
    rates, runs, arrivals, oracle = choose(arms, tune_seed)
    complete = sorted({name for name, _ in runs})
    if against not in (None, *complete):
        raise AlmaError(
            f"--against {against}: no such arm has a complete run with the rate that seed {tune_seed} chooses; "
            f"choose from {', '.join(complete)}"
        )
    oracle = against or oracle
    titles = [f"t{arrival}" for arrival in arrivals]
    lines = ["| arm | learning rate | seeds | " + " | ".join(f"{t} ppl" for t in titles) + " | last/first | FLOPs |"]
    lines += ["|---" * 3 + "|---:" * (len(arrivals) + 2) + "|"]
    for name, rate in rates.items():
        own = [run for (each, _), run in runs.items() if each == name]
        if not own:
            continue
        ppl = [_spread([math.exp(run.test[a]) for run in own]) for a in arrivals]
        flops = statistics.fmean(sum(run.flops.values()) for run in own)
        settled = f"{ppl[-1].mean / ppl[0].mean:.3f}"
        cells = [name, rate, str(len(own)), *(each.show(2) for each in ppl), settled, f"{flops:.2e}"]
        lines.append(f"| {' | '.join(cells)} |")
    if oracle is None:
        return "\n".join([*lines, "", "no oracle is complete yet"])
    others = [name for name in rates if name != oracle]
    return "\n".join([*lines, "", *_regret_table(runs, others, oracle, arrivals, titles, two_sided)])


def costs(arms: dict[Key, Run], tune_seed: int) -> str:
    """Write what each arm takes: parameters in memory, summed over the arrivals, FLOPs and seconds of its stages."""
    rates, runs, *_ = choose(arms, tune_seed)
    lines = ["| arm | parameters, summed | FLOPs | seconds of the stages |", "|---|---:|---:|---:|"]
    for name in rates:
        own = [run for (each, _), run in runs.items() if each == name]
        if own:
            params, flops, seconds = (
                statistics.fmean(sum(getattr(run, field).values()) for run in own)
                for field in ("params", "flops", "seconds")
            )
            lines.append(f"| {name} | {params:,.0f} | {flops:.2e} | {seconds:.0f} |")
    return "\n".join(lines)


def draw(arms: dict[Key, Run], tune_seed: int, path: Path) -> None:
    """Draw the regret at each arrival with its intervals. Raises AlmaError if there is none, or the file cannot be."""
    from fairseq_alma.report.figures import style

    _, runs, arrivals, oracle = choose(arms, tune_seed)
    if oracle is None or not any(name in SHOWN and (oracle, seed) in runs for name, seed in runs):
        raise AlmaError(
            f"--figure {path}: complete runs of {', '.join(SHOWN)} (one at least) and of one of {', '.join(FIRST_OF)} "
            f"are needed; there are {', '.join(names_of(arms))}"
        )
    with style.drawn(path, 6, 3.2) as figure:
        _draw_regret(figure.subplots(), runs, arrivals, oracle)


def _draw_regret(axes: Any, runs: dict[tuple[str, int], Run], arrivals: Sequence[int], oracle: str) -> None:
    for shift, (name, label) in enumerate(SHOWN.items()):
        seeds = [seed for each, seed in runs if each == name and (oracle, seed) in runs]
        if not seeds:
            continue
        gaps = [[runs[name, seed].test[a] - runs[oracle, seed].test[a] for seed in seeds] for a in arrivals]
        means = [statistics.fmean(gap) for gap in gaps]
        halves = [half_width(_spread(gap)) or 0.0 for gap in gaps]
        places = [a + 0.06 * (shift - 1) for a in arrivals]
        axes.errorbar(places, means, yerr=halves, marker="o", capsize=3, label=label)
    axes.axhspan(0, MARGIN, color="0.9", label="1 % of perplexity")
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set(xlabel="arrival", ylabel="regret against retraining, nats", xticks=arrivals)
    axes.legend()


def _regret_table(
    runs: dict[tuple[str, int], Run],
    names: Sequence[str],
    oracle: str,
    arrivals: list[int],
    titles: list[str],
    two_sided: bool,
) -> list[str]:
    head = (
        f"| {'difference from' if two_sided else 'regret against'} {oracle}, nats | seeds | "
        + " | ".join(titles)
        + " | sum | share of the gap closed | compute multiplier at the end |"
    )
    lines = [head, "|---" * 2 + "|---:" * (len(arrivals) + 3) + "|"]
    oracles = {seed: run for (name, seed), run in runs.items() if name == oracle}
    papers = {seed: run for (name, seed), run in runs.items() if name == PAPER}
    for name in names:
        own = {s: run for (n, s), run in runs.items() if n == name and s in oracles}
        if not own:
            continue
        regrets = [[run.test[a] - oracles[s].test[a] for s, run in own.items()] for a in arrivals]
        sums = [sum(run.test[a] - oracles[s].test[a] for a in arrivals) for s, run in own.items()]
        closed = [
            1 - sum(run.test[a] - oracles[s].test[a] for a in arrivals) / gap
            for s, run in own.items()
            if s in papers and (gap := sum(papers[s].test[a] - oracles[s].test[a] for a in arrivals))
        ]
        first = next(iter(own))
        points = [
            (float(oracles[first].updates[a]), statistics.fmean(oracles[s].test[a] for s in own)) for a in arrivals
        ]
        last = statistics.fmean(run.test[arrivals[-1]] for run in own.values())
        ratio = compute_multiplier(points, last, own[first].updates[arrivals[-1]])
        multiplier = "–" if ratio is None else f"{ratio:.2f}"
        cells = [f"{_spread(values).show_interval()} ({verdict(values, two_sided)})" for values in regrets]
        share = f"{100 * statistics.fmean(closed):.0f} %" if closed else "–"
        lines.append(
            f"| {name} | {len(own)} | "
            + " | ".join(cells)
            + f" | {_spread(sums).show_interval()} | {share} | {multiplier} |"
        )
    return lines


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r}: two numbers are needed, FIRST-LAST")
    return range(int(first), int(last) + 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options of a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--best-lr", metavar="ARM", help="print the learning rate that was best for an arm, nothing else"
    )
    options.add_argument("--against", metavar="ARM", help="differences from this arm (default: from the oracle)")
    options.add_argument("--differences", action="store_true", help="without the table of the arms themselves")
    options.add_argument("--costs", action="store_true", help="parameters in memory, FLOPs and seconds, nothing else")
    options.add_argument("--figure", type=Path, help="draw the regret at each arrival into this file (.svg)")
    options.add_argument("--seed", type=int, help="with which all learning rates were tried (default: the lowest)")
    options.add_argument("--seeds", metavar="FIRST-LAST", type=_seeds, help="of these seeds alone (default: all)")
    return options


def block(runs: RunTable, *options: str) -> str:
    """Return what options ask for."""
    return output(runs, parser().parse_args(options))


def asked(runs: RunTable, args: argparse.Namespace) -> tuple[dict[Key, Run], int]:
    """Return the arms with the seeds that are asked for, and the seed that chooses among learning rates."""
    found = arms_of(runs)
    arms = {key: run for key, run in found.items() if args.seeds is None or key[2] in args.seeds}
    seeds = sorted({seed for *_, seed in arms})
    if not found:
        raise AlmaError("no stage of these runs has ended; the tables begin with the first that has")
    if not arms:
        raise AlmaError(f"none of these --seeds are there; there are {', '.join(names_of(found))}")
    if args.seed not in (None, *seeds):
        raise AlmaError(f"--seed {args.seed}: no run has it; choose from {', '.join(map(str, seeds))}")
    return arms, seeds[0] if args.seed is None else args.seed


def output(runs: RunTable, args: argparse.Namespace) -> str:
    """Return what is asked for. Raises AlmaError if there are no such runs."""
    arms, tune_seed = asked(runs, args)
    if args.figure:
        draw(arms, tune_seed, args.figure)
    if args.costs:
        return f"{costs(arms, tune_seed)}\n"
    if args.best_lr:
        return f"{best_lr(arms, args.best_lr, tune_seed)}\n"
    two_sided = args.differences or args.against not in (None, *FIRST_OF)
    shown = tables(arms, tune_seed, args.against, two_sided)
    return (shown.partition("\n\n")[2] if args.differences else shown) + "\n"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    options = parser()
    options.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    args = options.parse_args(argv)
    paths = [path.parent for path in sorted(args.runs.glob("*/run.json")) if NAME.fullmatch(path.parent.name)]
    if not paths:
        found = "no runs called ARM-lrLR-seedN in it" if args.runs.is_dir() else "no such folder"
        raise AlmaError(f"--runs {args.runs}: {found}; give the folder that the runs of the arms lie in")
    runs = RunTable.of(map(read_run, paths))
    print(output(runs, args), end="")
    arms, tune_seed = asked(runs, args)
    if not args.best_lr and (names := left_out(arms, tune_seed)):
        why = f"no complete run with the rate that seed {tune_seed} chooses"
        print(f"left out: {', '.join(names)}: {why}; --seed gives another seed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
