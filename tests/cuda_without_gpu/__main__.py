"""Prints what each program gives a CUDA device to do, on any machine.

python -m tests.cuda_without_gpu                    # a table, half a minute
python -m tests.cuda_without_gpu base --by-name     # programs with "base" in their names, and their operations
python -m tests.cuda_without_gpu base --by-place    # and the lines of ours that ask for them
python -m tests.cuda_without_gpu --memory           # what the models of recipes/lm need of a device
"""

import argparse

import torch

from fairseq_alma.moe.short_copies import batch_of_update
from tests.cuda_without_gpu.fake_cuda import counted, cuda
from tests.cuda_without_gpu.programs import PROGRAMS, learn, run, switch_lm, tokens_of


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of programs (default: all)")
    parser.add_argument("--by-name", action="store_true", help="print how often each operation is launched, too")
    parser.add_argument("--by-place", action="store_true", help="print which line asks for how many, too")
    parser.add_argument("--memory", action="store_true", help="print what a training needs of a device instead")
    args = parser.parse_args()
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
        for found in (counts.by_name,) * args.by_name + (counts.by_place,) * args.by_place:
            print(*(f"    {number} {each}" for each, number in found.most_common()), sep="\n")


def print_memory() -> None:
    """Print what weights, moments and a batch of 8 x 512 tokens in bf16 take."""
    print("| model | experts | parameters | weights, moments | a batch, gradients with it | together |")
    print("|---|---:|---:|---:|---:|---:|")
    for size in ("base", "large"):
        for num_experts in (4, 8, 12):
            with cuda():
                model = switch_lm(size, num_experts=num_experts)
                parameters = sum(parameter.numel() for parameter in model.parameters())
                with batch_of_update(0), counted() as counts:
                    learn(model, tokens_of(8, 512), "bf16")
            figures = [each / 1e9 for each in (12 * parameters, counts.peak, 12 * parameters + counts.peak)]
            row = " | ".join(f"{each:.1f} GB" for each in figures)
            print(f"| {size} | {num_experts} | {parameters / 1e6:.0f} M | {row} |", flush=True)


if __name__ == "__main__":
    main()
