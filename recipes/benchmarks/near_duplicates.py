"""What `alma-prep-text --near-duplicates minhash` costs: CPU milliseconds per MB of text, and memory per document.

    python recipes/benchmarks/near_duplicates.py --input text.txt --documents 1000000

The first is of one process that signs the documents of a file (separated by empty lines); the second is the peak of the
task that joins so many signed documents to groups, a tenth of which have a near-duplicate, less that of no documents.
"""

import argparse
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from data_prep.text.buckets import KEYED
from data_prep.text.near_copies import FindNearCopies, bands_of
from data_prep.text.passes import Folder

_AT_ONCE = 1000


def seconds_per_mb(path: Path) -> float:
    """Return the CPU seconds that signing a megabyte takes."""
    documents = path.read_text().split("\n\n")
    begun = time.process_time()
    for first in range(0, len(documents), _AT_ONCE):
        bands_of(documents[first : first + _AT_ONCE])
    return (time.process_time() - begun) / (path.stat().st_size / 1e6)


def peak_of(number: int) -> int:
    """Return the most bytes that a process has had which joins so many documents."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root)
        records = np.zeros(number, KEYED)
        records["key"], records["row"] = draw.integers(2**63, size=number), np.arange(number)
        bands = draw.integers(2**63, size=(number, 9)).astype(np.uint64)
        bands[: number // 10, 0] = bands[number // 10 : number // 10 * 2, 0]
        work = SimpleNamespace(pieces=[None], there=None, folder=folder, of_piece=lambda piece: folder)
        folder.save("signed.npz", records=records, bands=bands, held_out=np.zeros(number, bool))
        del records, bands
        for _ in FindNearCopies().make(work, 0):  # type: ignore[arg-type]
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    arguments = parser.parse_args()
    print(f"{1000 * seconds_per_mb(arguments.input):.0f} ms of CPU per MB")
    peaks = []
    for number in (0, arguments.documents):
        with ProcessPoolExecutor(1) as pool:
            peaks.append(pool.submit(peak_of, number).result())
    print(f"{(peaks[1] - peaks[0]) / arguments.documents:.0f} bytes per document")


if __name__ == "__main__":
    main()
