"""Kill a small run at each of its file operations, resume it, and compare it with an uninterrupted run.

    python -m tests.kills.matrix                       three runs, each operation
    python -m tests.kills.matrix --run text-ens --every 9 --how power
    python -m tests.kills.matrix --run text-gmoe --step 17 23

The runs must end with equal figures, weights and file names.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

from tests.kills.crashes import HOW, Crash, Operation
from tests.kills.launch import launch
from tests.kills.learners import RUNS, arguments_of, make_stream
from tests.runs.results import stage_records, weight_sums

MEMORY = "/dev/shm"  # fsync is fast here


class Outcome(NamedTuple):
    """The part of a run that must not depend on kills."""

    records: Any
    weights: dict[str, str]
    files: list[str]

    @classmethod
    def of(cls, run: Path) -> "Outcome":
        files = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
        return cls(stage_records(run), weight_sums(run), sorted(str(path.relative_to(run)) for path in files))

    def difference(self, other: "Outcome") -> str:
        differing = [name for name in self._fields[:2] if getattr(self, name) != getattr(other, name)]
        return " ".join([*differing, *sorted({*self.files} ^ {*other.files})])


class Matrix:
    """The kills of one run; ``root`` is a temporary folder."""

    def __init__(self, name: str, root: Path, how: str) -> None:
        self.name, self.how, self.run, self.log = name, how, root / f"{name}-run", root / f"{name}.log"
        self.arguments = arguments_of(name, make_stream(name.partition("-")[0], root), self.run)
        self.operations, status = self._launch()
        if status != 0:
            raise SystemExit(f"{name}: the run fails without a kill: {self.log.read_text()[-500:]}")
        self.uninterrupted = Outcome.of(self.run)

    def kill(self, step: int) -> str:
        """Kill the run at a step and resume it; return the differences to the uninterrupted run."""
        shutil.rmtree(self.run)
        _, killed = self._launch(step)
        _, status = self._launch()
        if killed == 0 or status != 0:
            return f"exit status {status} after {killed}: {self.log.read_text()[-300:]}"
        return self.uninterrupted.difference(Outcome.of(self.run))

    def _launch(self, step: int = 0) -> tuple[list[Operation], int]:
        crash = Crash(self.run, self.log.with_suffix(".journal"), step, self.how)
        self.log.unlink(missing_ok=True)
        status = launch(self.arguments, self.log, crash)
        return crash.operations(), status


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return 1 if a resumed run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--step", type=int, nargs="+", help="numbers of operations to kill at, from 1 (default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="kill at every N-th operation (default: 1)")
    parser.add_argument("--how", choices=HOW, default="kill", help="; ".join(f"{how}: {HOW[how]}" for how in HOW))
    arguments = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as root:
        for name in arguments.run:
            matrix = Matrix(name, Path(root).resolve(), arguments.how)
            steps = arguments.step or [*range(1, len(matrix.operations) + 1, arguments.every)]
            found = {step: matrix.kill(step) for step in steps}
            for step, difference in found.items():
                if difference:
                    print(f"{name} step {step} {matrix.operations[step - 1]}: {difference}", flush=True)
            rows.append((name, len(matrix.operations), len(steps), sum(map(bool, found.values()))))
    print(f"\n{'run':<24}{'operations':>12}{'kills':>8}{'deviations':>12}")
    for row in rows:
        print(f"{row[0]:<24}{row[1]:>12,}{row[2]:>8,}{row[3]:>12,}")
    return int(any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
