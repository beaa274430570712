"""``alma-report``: the table of perplexity per mega-batch, over any number of runs."""

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.cli.run_figures import RunFigures, read_figures
from fairseq_alma.errors import AlmaError
from fairseq_alma.metrics import anytime
from fairseq_alma.metrics.table import Cell, render_csv, render_markdown, show_count, show_number, show_power

NOTES = """\
t0, t1, ...: test perplexity after the arrival of that mega-batch; *: the learner is waiting; –: not run yet.
avg PPL: mean over all arrivals; while waiting, the model of the last update counts, before the first update an
untrained one, whose perplexity is the number of units. final PPL and bits per byte: after the last update.
params: of all that predicts. train FLOPs: of all updates together.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="alma-report",
        description="Print the test perplexity of runs after each mega-batch, with size and cost.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that alma-stream wrote (--run)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write perplexity.md and perplexity.csv there")
    parser.add_argument(
        "--mix", action="store_true", help="put runs on different streams into one table; bits per byte compare"
    )
    return parser


def perplexity_table(runs: Sequence[RunFigures]) -> tuple[list[str], list[list[str]], list[list[Cell]]]:
    """Lay out the table.

    Args:
        runs: one row each.

    Returns:
        The header; the rows as people read them; the rows with plain numbers.
    """
    num_arrivals = max(run.num_arrivals for run in runs)
    arrivals = [f"t{t}" for t in range(num_arrivals)]
    header = ["learner", "run", "experts", "params", *arrivals, "avg PPL", "final PPL", "bits per byte", "train FLOPs"]
    shown, plain = [], []
    for run in runs:
        nan = float("nan")
        cells = anytime.table_cells(run.ppl, run.planned, run.num_arrivals) + [nan] * (num_arrivals - run.num_arrivals)
        average = nan
        if run.is_complete:
            average = anytime.average_perplexity(run.ppl, run.num_arrivals, run.stream["vocab_size"])
        flops = anytime.cumulative_computation(run.train_flops)
        params, experts, ppl = (anytime.final(each) for each in (run.num_params, run.num_experts, run.ppl))
        ends: list[Optional[float]] = [average, ppl if ppl is not None else nan, _bits_per_byte(run)]
        numbers = [show_number(value, 2) for value in cells]
        numbers += [show_number(value, digits) for value, digits in zip(ends, (2, 2, 3), strict=True)]
        head = [run.label, str(run.path)]
        shown.append([*head, _experts(run, experts), show_count(params), *numbers, show_power(flops)])
        plain.append([*head, _experts(run, experts), params, *cells, *ends, flops])
    return header, shown, plain


def _bits_per_byte(run: RunFigures) -> float:
    loss, test = anytime.final(run.loss), run.stream["test"]
    bits = None if loss is None else anytime.bits_per_byte(loss, test["num_tokens"], test["num_bytes"])
    return float("nan") if bits is None else bits


def _experts(run: RunFigures, experts: Optional[float]) -> str:
    """Spell experts as the paper does: ``4`` for one model, ``4@2`` for two models with 4 experts each."""
    members = anytime.final(run.num_members)
    if experts is None or members is None:
        return "–"
    return f"{experts}@{members}" if members > 1 else f"{experts}"


def _read_runs(paths: Sequence[Path]) -> tuple[list[RunFigures], int]:
    """Read the runs; name those that cannot be read, and count them."""
    runs, num_damaged = [], 0
    for path in paths:
        try:
            runs.append(read_figures(path))
        except AlmaError as error:
            print(error, file=sys.stderr)
            num_damaged += 1
    return runs, num_damaged


def _require_one_stream(runs: Sequence[RunFigures]) -> None:
    for run in runs[1:]:
        if run.stream["fingerprint"] != runs[0].stream["fingerprint"]:
            raise AlmaError(
                f"{run.path}: its stream ({_name_stream(run)}) is not that of {runs[0].path}"
                f" ({_name_stream(runs[0])}), "
                "so perplexities do not compare; report them apart, or give --mix"
            )


def _name_stream(run: RunFigures) -> str:
    return f"{run.stream['path']}, fingerprint {run.stream['fingerprint'][:12]}"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    runs, num_damaged = _read_runs(arguments.runs)
    if not runs:
        return 1
    if not arguments.mix:
        _require_one_stream(runs)
    header, shown, plain = perplexity_table(runs)
    markdown = f"{render_markdown(header, shown)}\n{NOTES}"
    print(markdown, end="")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "perplexity.md").write_text(markdown, encoding="utf-8")
        (arguments.out / "perplexity.csv").write_text(render_csv(header, plain), encoding="utf-8")
    return 1 if num_damaged else 0
