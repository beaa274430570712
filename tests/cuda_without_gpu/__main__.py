"""Prints what each program gives a CUDA device to do, on any machine.

python -m tests.cuda_without_gpu                    # a table, half a minute
python -m tests.cuda_without_gpu base --by-name     # programs with "base" in their names, and their operations
"""

import argparse

from tests.cuda_without_gpu.programs import PROGRAMS, run


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of programs (default: all)")
    parser.add_argument("--by-name", action="store_true", help="print how often each operation is launched, too")
    args = parser.parse_args()
    print("| program | operations | casts | GB | waits of the host |\n|---|---:|---:|---:|---|")
    for name in PROGRAMS:
        if args.names and not any(part in name for part in args.names):
            continue
        counts = run(name)
        found = sorted((counts.host_reads + counts.host_writes).items())
        waits = ", ".join(f"{place} ({number})" for place, number in found)
        print(f"| {name} | {counts.operations:,} | {counts.casts} | {counts.bytes / 1e9:.2f} | {waits} |", flush=True)
        if args.by_name:
            print(*(f"    {number} {each}" for each, number in counts.by_name.most_common()), sep="\n")


if __name__ == "__main__":
    main()
