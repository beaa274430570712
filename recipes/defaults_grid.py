"""What alma-stream chooses by itself against a grid of twelve: four learning rates, three sizes, equal CPU time.

    python recipes/defaults_grid.py STREAM --minutes 3             # given twice: two runs at a time, a core each
    python recipes/defaults_grid.py STREAM --minutes 3 --table     # what has ended

A run has one core for twice the minutes, as two cores would have them once. The time per token of each size is
measured first, as CPU time, so that other work on the machine moves no figure; from it follow the size that ``--hours``
would take, and how much of the text each size can read. All else is what alma-stream chooses. The claim: bits per byte
on test with the defaults are at most 2 % above those of the best of the twelve, which is chosen by valid. A killed call
goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional, Sequence

from ladder import Claim

from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import write_json_atomically
from fairseq_alma.report.read_run import RunTable, read_run
from fairseq_alma.report.spelling import render_markdown
from fairseq_alma.text.model_size import LENGTH, Shape, Speed, Wish, by_time, seconds_per_token, shapes
from fairseq_alma.text.recipe import RATE

RATES = tuple(RATE * factor for factor in (0.5, 1, 2, 4))
SIZES = (0.5, 1, 2)
"""Of the parameters that the defaults have."""
CORES = 2
ROUNDS = 3
START = 4.0
"""CPU seconds of a stage beside its updates and tests."""


class Point(NamedTuple):
    """A run: so many parameters, passes through the text, and a learning rate."""

    size: int
    passes: float
    rate: float

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"size{self.size}-lr{self.rate:g}"


def plan(stream: Stream, minutes: float) -> tuple[Point, list[Point]]:
    """Return what the defaults are, and the grid, which has them too."""
    assert stream.tokenizer is not None
    tokens = [stream.megabatch(t).num_tokens for t in range(stream.num_megabatches)]
    possible = shapes(stream.tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS)
    hours = CORES * minutes / 60
    costs: dict[Shape, float] = {}

    def measured(asked: Sequence[Shape], tokens_per_update: int) -> Speed:
        job = {"batch": tokens_per_update // LENGTH, "length": LENGTH, "on_cpu": True}
        for shape in asked:
            rounds = [seconds_per_token(shape, job, time.process_time) for _ in range(ROUNDS)]
            costs[shape] = min(rounds)
        return Speed([costs[shape] for shape in asked], START / 2)

    chosen = by_time(possible, tokens, stream, Wish(hours=hours), measured)
    default = Point(chosen.shape.num_params, chosen.passes, RATE)
    wanted = [factor * default.size for factor in SIZES]
    near = {min(possible, key=lambda each: abs(each.num_params - size)): None for size in wanted}
    points = []
    for shape in near:
        wish = Wish(size=shape.num_params, hours=hours)
        own = chosen if shape == chosen.shape else by_time(possible, tokens, stream, wish, measured)
        points += [Point(shape.num_params, own.passes, rate) for rate in RATES]
    return default, points


def training_of(stream: Path, folder: Path, point: Point) -> list[str]:
    """Return the call of alma-stream."""
    own = ["--stream", str(stream), "--run", str(folder / point.name), "--save-every", "20000"]
    return ["alma-stream", *own, "--size", str(point.size), "--passes", f"{point.passes:.4g}", "--", "--lr",
            f"{point.rate:g}", "--cpu"]  # fmt: skip


def train(stream: Path, folder: Path, points: Sequence[Point]) -> None:
    """Train what has not ended, and what no other process has taken."""
    for point in points:
        with Claim(folder / f"{point.name}.lock") as claimed:
            if claimed and ended(folder, point) is None:
                print(f"{time.strftime('%T')} {point.name}", flush=True)
                with (folder / f"{point.name}.log").open("a") as log:
                    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                    words = training_of(stream, folder, point)
                    subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environment)


def ended(folder: Path, point: Point) -> Optional[RunTable]:
    """Return a run that has ended; None: it has not."""
    path = folder / point.name
    runs = RunTable.of([read_run(path)]) if (path / "run.json").is_file() else None
    return runs if runs is not None and runs.facts.is_complete.all() else None


def table(folder: Path, default: Point, points: Sequence[Point]) -> str:
    """Lay out what has ended, and how far the defaults are from the best of it."""
    runs = {point: found for point in points if (found := ended(folder, point)) is not None}
    if not runs:
        raise AlmaError(f"{folder}: nothing has ended there; call it without --table first")
    valid = {point: each.arrivals.valid.iloc[-1] for point, each in runs.items()}
    bits = {point: each.facts.bits_per_byte.iloc[0] for point, each in runs.items()}
    sizes = {point.size: point.passes for point in points}
    rows = [
        [f"{size:,}", f"{passes:.3g}", *(_cell(bits.get(Point(size, passes, rate))) for rate in RATES)]
        for size, passes in sizes.items()
    ]
    text = render_markdown(["parameters", "passes", *(f"{rate:g}" for rate in RATES)], rows)
    best = min(valid, key=lambda point: valid[point])
    text += f"\n\nThe best of {len(runs)} by valid: {best.name}, {bits[best]:.4f} bits per byte."
    if default in bits:
        behind = 100 * (bits[default] / bits[best] - 1)
        text += f" The defaults, {default.name}: {bits[default]:.4f}, {behind:+.2f} %."
    return text


def _cell(bits: Optional[float]) -> str:
    return "" if bits is None else f"{bits:.4f}"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stream", type=Path, help="of text that nothing was tuned on")
    options.add_argument("--minutes", type=float, required=True, help="of two cores, for each run")
    options.add_argument("--runs", type=Path, default=Path("runs/defaults"), help="everything is below RUNS/MINUTES")
    options.add_argument("--table", action="store_true", help="show what has ended")
    args = options.parse_args(argv)
    folder = args.runs / f"{args.minutes:g}"
    folder.mkdir(parents=True, exist_ok=True)
    planned = folder / "plan.json"
    with Claim(folder / "plan.lock", wait=True):
        if not planned.is_file():
            default, points = plan(Stream.open(args.stream), args.minutes)
            write_json_atomically(planned, {"default": default, "points": points})
    found = json.loads(planned.read_text())
    default, points = Point(*found["default"]), [Point(*each) for each in found["points"]]
    if not args.table:
        first = [default, *(point for point in points if point != default)]
        train(args.stream, folder, first)
    print(table(folder, default, points))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
