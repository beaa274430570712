"""Prints what each program gives a CUDA device to do, on any machine.

python -m tests.cuda_without_gpu                    # a table, half a minute
python -m tests.cuda_without_gpu base --by-name     # programs with "base" in their names, and their operations
python -m tests.cuda_without_gpu base --by-place    # and the lines of ours that ask for them, most bytes first
python -m tests.cuda_without_gpu --hours            # a bound on speed, and hours of the paper's run, by a model
python -m tests.cuda_without_gpu --memory           # what the trainings of recipes/lm need of a device
"""

import argparse
from typing import NamedTuple

import torch

from fairseq_alma.checkpoints.model_facts import shape_from_weights
from fairseq_alma.moe.short_copies import batch_of_update
from tests.cuda_without_gpu.fake_cuda import counted, cuda
from tests.cuda_without_gpu.memory import need_of, training_of
from tests.cuda_without_gpu.programs import PROGRAMS, learn, run, switch_lm, tokens_of, update


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of programs (default: all)")
    parser.add_argument("--by-name", action="store_true", help="print how often each operation is launched, too")
    parser.add_argument("--by-place", action="store_true", help="print which line asks for how many, too")
    parser.add_argument("--memory", action="store_true", help="print what a training needs of a device instead")
    parser.add_argument("--hours", action="store_true", help="print what follows for the paper's run, by a model")
    args = parser.parse_args()
    if args.hours:
        print_hours()
        return
    if args.memory:
        print_memory()
        return
    print("| program | operations | casts | GB | waits of the host |\n|---|---:|---:|---:|---|")
    for name in PROGRAMS:
        if args.names and not any(part in name for part in args.names):
            continue
        with torch.autograd.set_detect_anomaly(args.by_place, check_nan=False):
            counts = run(name)
        found = sorted((counts.host_reads + counts.host_writes).items())
        waits = ", ".join(f"{place} ({number})" for place, number in found)
        print(f"| {name} | {counts.operations:,} | {counts.casts} | {counts.bytes / 1e9:.2f} | {waits} |", flush=True)
        for given, found, moved in (
            (args.by_name, counts.by_name, counts.bytes_of),
            (args.by_place, counts.by_place, counts.bytes_at),
        ):
            for each, size in moved.most_common() if given else ():
                print(f"    {size / 1e9:.2f} GB {found[each]} {each}")


class Device(NamedTuple):
    """A GPU by its data sheet, in a second: bytes of memory, dense bf16 FLOPs, bytes to others (NVLink, one way)."""

    memory: float
    flops: float
    link: float


DEVICES = {"H100": Device(3.35e12, 989e12, 450e9), "A100": Device(2.04e12, 312e12, 300e9)}
LAUNCH = 5e-6
"""Seconds that the host takes for an operation; assumed."""
UPDATES, SEQUENCES, LENGTH = 4 * 120_000, 192, 512
"""Of the paper's run: four stages, and what makes an update."""


def print_hours() -> None:
    """Print the time of an update and of the paper's run as the counts have it, 8 sequences a batch, 12 experts, bf16.

    A batch, and what the optimizer does, takes the larger of launches, and of bytes and FLOPs one after the other; then
    a ring adds up fp32 gradients, once an update. Nothing else is in it: no data, no log, no kernel below its peak.
    """
    print("| model | GPUs | ms an update | tokens a second | MFU | hours |\n|---|---|---:|---:|---:|---:|")
    for size in ("base", "large"):
        with cuda():
            model, sample = switch_lm(size), tokens_of(8, LENGTH)
            shape = shape_from_weights(model.state_dict(), LENGTH)
            found = []
            for update_number in (0, 0, 1):  # later batches of an update add to gradients; the first one casts weights
                with batch_of_update(update_number), counted() as counts:
                    learn(model, sample, "bf16")
                found.append(counts)
            step = update("fused_adam", size)
        _, later, first = found
        flops = shape.train_flops_per_token * 8 * LENGTH
        for name, device in DEVICES.items():
            for number in (1, 8):

                def seconds(counts, flops=0.0, device=device):
                    return max(LAUNCH * counts.operations, counts.bytes / device.memory + flops / device.flops)

                batches = SEQUENCES // 8 // number
                spent = seconds(first, flops) + (batches - 1) * seconds(later, flops) + seconds(step)
                spent += 2 * (number - 1) / number * 4 * shape.num_params / device.link
                rate = SEQUENCES * LENGTH / spent
                mfu = batches * flops / spent / device.flops
                row = f"{1000 * spent:.1f} | {rate:,.0f} | {mfu:.0%} | {UPDATES * spent / 3600:.1f}"
                print(f"| {size} | {number} {name} | {row} |", flush=True)


def print_memory() -> None:
    """Print what the trainings of ``recipes/lm`` need, on 8 devices and on one, which has no buckets."""
    columns = ("weights, moments", "a batch, gradients", "buckets", "each of 8 GPUs", "1 GPU")
    print(f"| recipe | experts | parameters | {' | '.join(columns)} |\n|---|---:|---:|{'---:|' * len(columns)}")
    for size in ("base", "large"):
        words = training_of(f"sm_{size}")
        for num_experts in (4, 8, 12):
            need = need_of(words, num_experts)
            batch = need.most - need.kept - need.buckets
            figures = (need.kept, batch, need.buckets, need.most, need.most - need.buckets)
            row = " | ".join(f"{each / 1e9:.1f} GB" for each in figures)
            print(f"| `lm/*_{size}.sh` | {num_experts} | {need.parameters / 1e6:.0f} M | {row} |", flush=True)


if __name__ == "__main__":
    main()
