"""Time what anytime training adds to an update, and to the start of a stage.

    python recipes/benchmarks/anytime_cost.py --stream STREAM            # two minutes on an idle core
    python recipes/benchmarks/anytime_cost.py --stream STREAM --dim 256 --layers 4 --updates 30

Through fairseq-train's own code: in one training every other update leaves the average out; stages that begin with
weights alone (``--finetune-from-model``) and with a carried optimizer take turns. Figures are processor time, which
other work on the machine changes less than the time on the clock; medians.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train
from torch import nn

import fairseq_alma
from fairseq_alma.training.average import WeightAverage

WARM_UP = 10


def seconds(words: list[str], *more: str) -> float:
    """Train and return the processor time that it took."""
    parser = options.get_training_parser()
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [*words, *more]))
    before = time.process_time()
    train.main(config)
    return time.process_time() - before


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the options that all trainings share."""
    sizes = ["--decoder-layers", str(args.layers), "--decoder-embed-dim", str(args.dim)]
    sizes += ["--decoder-ffn-embed-dim", str(4 * args.dim), "--decoder-attention-heads", "4"]
    words = [str(args.stream), "--task", "alma_lm", "--arch", "alma_switch_lm", "--num-experts", "4", *sizes]
    words += [
        "--criterion",
        "alma_switch_cross_entropy",
        "--optimizer",
        args.optimizer,
        "--lr",
        "0.003",
        "--clip-norm",
        "1",
    ]
    words += [
        "--tokens-per-sample",
        "128",
        "--batch-size",
        str(args.batch_size),
        "--dropout",
        "0",
        "--num-workers",
        "0",
    ]
    words += ["--disable-validation", "--no-epoch-checkpoints", "--log-format", "none", "--cpu"]
    return [*words, "--save-dir", str(folder)]


def compare_updates(args: argparse.Namespace, folder: Path) -> None:
    """Time the updates of one training, every other one without the average."""
    times: dict[bool, list[float]] = {True: [], False: []}
    last = time.process_time()
    whole_step = WeightAverage.after_step

    def timed(average: WeightAverage, model: nn.Module, update: int) -> None:
        nonlocal last
        averages = update % 2 == 0
        if averages:
            whole_step(average, model, update)
        now = time.process_time()
        times[averages].append(now - last)
        last = now

    with mock.patch.object(WeightAverage, "after_step", timed):
        words = [*command(args, folder), "--megabatch", "0", "--no-save", "--ema-half-life", "1/16"]
        seconds(words, "--max-update", str(WARM_UP + args.updates))
    without, with_average = (1000 * statistics.median(times[averages][WARM_UP // 2 :]) for averages in (False, True))
    print(
        f"an update of {args.batch_size * 128} tokens: {without:.1f} ms, with the average {with_average:.1f} ms, "
        f"{100 * (with_average / without - 1):+.1f} %"
    )


def compare_starts(args: argparse.Namespace, folder: Path) -> None:
    """Time the first update of a second stage, which includes its start, in turns."""
    first = folder / "first"
    seconds([*command(args, first), "--megabatch", "0"], "--max-update", "3", "--ema-half-life", "1/16")
    start = str(first / "checkpoint_last.pt")
    ways: dict[str, list[str]] = {
        "weights alone": ["--finetune-from-model", start, "--max-update", "1"],
        "carried on": ["--continue-once", start, "--continue-as", "stage", "--max-update", "4"],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name, own in ways.items():
            words = command(args, folder / f"{number}-{name.replace(' ', '-')}")
            found[name].append(seconds([*words, "--megabatch", "1", "--no-save"], *own))
    each = {name: statistics.median(times) for name, times in found.items()}
    print(
        "start and first update of a stage: " + ", ".join(f"{name} {1000 * took:.0f} ms" for name, took in each.items())
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("--stream", type=Path, required=True, help="of text, with two mega-batches or more")
    add("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    add("--layers", type=int, default=2, help="(default: %(default)s)")
    add("--batch-size", type=int, default=8, help="sequences of 128 tokens in an update (default: %(default)s)")
    add("--optimizer", default="adam", help="(default: %(default)s)")
    add("--updates", type=int, default=100, help="timed, half of them with the average (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of the starts of a stage (default: %(default)s)")
    args = parser.parse_args()
    fairseq_alma.register()
    with tempfile.TemporaryDirectory() as folder:
        compare_updates(args, Path(folder))
        compare_starts(args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
