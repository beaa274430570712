"""Measure what the main process of alma-prep-text does itself: CPU time per MB of text, and its memory.

What workers do can be spread over any number of cores; what is measured here cannot. Run from the root of a checkout,
of an older one too, to compare: only the command's ``main`` is used. Time: half a minute per 100 MB.

    python recipes/benchmarks/prep_parent.py wiki.00.txt wiki.01.txt --megabatches 4
"""

import argparse
import lzma
import resource
import sys
import tempfile
from pathlib import Path

from data_prep.text.command import main as prep_text
from fairseq_alma.data.stream import Stream

READ_AT_ONCE = 1 << 20


def size_of(path: Path) -> int:
    """Return the bytes of text in a file, plain or .xz."""
    if path.suffix != ".xz":
        return path.stat().st_size
    with lzma.open(path) as file:
        return sum(len(piece) for piece in iter(lambda: file.read(READ_AT_ONCE), b""))


def cpu_seconds(who: int) -> float:
    """Return the CPU seconds of this process, or of its children that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prepare the text once and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--megabatches", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    args, more = parser.parse_known_args()
    megabytes = sum(map(size_of, args.inputs)) / 1e6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    own = cpu_seconds(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "stream"
        sizes = ["--megabatches", args.megabatches, "--workers", args.workers, "--vocab-size", 8000, "--out", out]
        if prep_text([*map(str, [*args.inputs, *sizes]), *more]):
            sys.exit(1)
        documents = sum(split.num_documents for split in Stream.open(out).splits)
    own = cpu_seconds(resource.RUSAGE_SELF) - own
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{megabytes:.0f} MB, {documents:,} documents, {args.megabatches} mega-batches: the main process "
        f"{1000 * own / megabytes:.2f} ms per MB and {grown / 1024:.0f} MiB more, all of them "
        f"{1000 * (own + cpu_seconds(resource.RUSAGE_CHILDREN)) / megabytes:.0f} ms per MB"
    )


if __name__ == "__main__":
    main()
