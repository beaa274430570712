"""Kill one small run of each learner at each of its file operations, resume it, and compare it with the whole run.

So with the other commands that write a file or a folder, which are given again.

    python -m tests.kills.matrix                                    all of it, hours; results are kept and resumed from
    python -m tests.kills.matrix --learner images-gmoe --every 5
    python -m tests.kills.matrix --learner alma-export alma-grow --how meet
    python -m tests.kills.matrix --learner text-sm --step 17 23 --how power --twice

What must be equal in the end: figures, weights, and which files there are.
"""

import argparse
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Union

from tests.engine import TIMEOUT
from tests.kills.crashes import HOW, NUM_MEETING, Crash, Operation
from tests.kills.launch import begin, launch
from tests.kills.learners import LEARNERS, Learner, make_stream
from tests.kills.tools import ALL_TOOLS, MODELS, Tool, make_models
from tests.runs.results import stage_records, weight_sums

MEMORY = "/dev/shm"  # where fsync costs nothing
GOLDEN = 0.618034
NUM_SECOND = 17  # the second kill is at one of so many operations
HOUR = 3600
TENSORS = ".safetensors"
REFUSALS = ("another alma-", "exists already", "exists and is not empty", "something was put there meanwhile")
"""What a command may say where another is at work on the same, or where all of it has been done."""
ROWS = [*LEARNERS, *ALL_TOOLS]
Row = Union[Learner, Tool]


class Outcome(NamedTuple):
    """What a run left, as far as it must not depend on kills."""

    records: dict[str, Any]
    weights: dict[str, str]
    files: list[str]

    @classmethod
    def of(cls, run: Path, is_resumed: bool = True) -> "Outcome":
        """Return that of a run; of another command the content of its files."""
        places = sorted({path.parent.relative_to(run) for path in run.rglob("run.json")})
        files = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
        return cls(
            {str(place): stage_records(run / place) for place in places},
            (weight_sums(run) if is_resumed else {})
            | {str(path.relative_to(run)): _sum(path) for path in files if not is_resumed or path.suffix == TENSORS},
            sorted(str(path.relative_to(run)) for path in files),
        )

    def difference(self, other: "Outcome") -> str:
        """Say what differs, or nothing."""
        if self == other:
            return ""
        differing = [name for name in self._fields[:2] if getattr(self, name) != getattr(other, name)]
        more = sorted({*self.files} ^ {*other.files})
        return " ".join([*differing, *(["files"] if more else []), *more])


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Matrix:
    """The kills of one learner, or of another command.

    Args:
        learner: whose run.
        root: folder to work in; results stay there.
        how: see `crashes.HOW`.
        is_twice: kill the resumed run, too.
    """

    def __init__(self, learner: Row, root: Path, how: str, is_twice: bool) -> None:
        self.learner, self.root, self.how, self.is_twice = learner, root, how, is_twice
        self.name = "-".join([str(learner), *([how] if how != "kill" else []), *(["twice"] if is_twice else [])])
        self.results = root / f"{self.name}.jsonl"
        self.stream = root / f"{learner.kind}-stream"
        self.run, self.log = root / f"{self.name}-run", root / f"{self.name}.log"

    def measure(self) -> None:
        """Run once without a kill: that is what all others are compared with."""
        operations, status = self._launch(fresh=True)
        if status != 0:
            raise SystemExit(f"{self.learner}: the run fails without a kill; see {self.log}")
        self.operations = operations
        self.whole = self._outcome()

    def done(self) -> dict[int, dict[str, Any]]:
        """Return the results up to now, by step."""
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        return {result["step"]: result for result in map(json.loads, lines)}

    def kill(self, step: int) -> dict[str, Any]:
        """Kill the run at a step, resume it, compare and keep the result."""
        operations, killed = self._meet(step) if self.how == "meet" else self._launch(step, fresh=True)
        try:
            if self.how == "clock":
                self._turn_clock_back()
            if self.is_twice:
                self._launch(1 + step % NUM_SECOND)
            _, status = self._launch()
            is_well = status == 0 or (not self.learner.is_resumed and status == 1 and self._is_refused())
            difference = self.whole.difference(self._outcome()) if is_well else f"exit status {status}"
        except subprocess.TimeoutExpired:
            difference = "hangs"
        if killed == 0:
            what = "did not end as three at once may" if self.how == "meet" else "was not killed"
            difference = f"{what}, {difference}"
        operation = " ".join(operations[-1]).replace(str(self.run), "").replace("\t", " ") if operations else ""
        result = {"step": step, "operation": operation, "difference": difference}
        with open(self.results, "a") as file:
            file.write(json.dumps(result) + "\n")
        if difference:
            print(f"{self.name} step {step} ({operation}): {difference}", flush=True)
            kept = self.root / "deviations" / f"{self.name}-{step}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.run, kept)
            shutil.copy(self.log, kept / "alma-stream.log")
        return result

    def _launch(self, step: int = 0, fresh: bool = False) -> tuple[list[Operation], int]:
        if fresh:
            self._clear()
        crash = Crash(self.run, self.root / f"{self.name}.journal", step, self.how)
        status = launch(self.learner.arguments(self.stream, self.run), self.log, crash, self.learner.main)
        return crash.operations(), status

    def _meet(self, step: int) -> tuple[list[Operation], int]:
        """Run three commands at once; return what the first did, and a status other than 0 if all ended as they may."""
        self._clear()
        meeting = mmap.mmap(-1, NUM_MEETING)
        journals = [self.root / f"{self.name}-{place}.journal" for place in range(NUM_MEETING)]
        logs = [journal.with_suffix(".log") for journal in journals]
        for log in logs:
            log.unlink(missing_ok=True)
        crashes = [Crash(self.run, journal, step, "meet", "", meeting, place) for place, journal in enumerate(journals)]
        words = self.learner.arguments(self.stream, self.run)
        running = [begin(words, log, crash, self.learner.main) for log, crash in zip(logs, crashes, strict=True)]
        statuses = [each.wait(TIMEOUT) for each in running]
        self.log.write_text("".join(log.read_text() for log in logs))
        ended = [status == 0 or (status == 1 and _says(log)) for status, log in zip(statuses, logs, strict=True)]
        num_done = statuses.count(0)
        return crashes[0].operations(), int(
            all(ended) and (num_done >= 1 if self.learner.is_resumed else num_done == 1)
        )

    def _turn_clock_back(self) -> None:
        """Let all that is there have been changed an hour later, as after a clock that went back."""
        for path in self.run.rglob("*"):
            changed = path.stat().st_mtime + HOUR
            os.utime(path, (changed, changed))

    def _clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self.learner.begin(self.stream, self.run)

    def _outcome(self) -> Outcome:
        return Outcome.of(self.run, self.learner.is_resumed)

    def _is_refused(self) -> bool:
        return _says(self.log)


def _says(log: Path) -> bool:
    """Tell whether the last line is one of the refusals that are right."""
    lines = log.read_text().splitlines()
    return bool(lines) and any(refusal in lines[-1] for refusal in REFUSALS)


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [str(row) for row in ROWS]
    options.add_argument("--learner", nargs="+", choices=names, default=names, metavar="L", help=", ".join(names))
    options.add_argument("--step", type=int, nargs="+", help="kill at these operations, from 1 (default: at each)")
    options.add_argument("--every", type=int, default=1, metavar="N", help="kill at every N-th operation")
    options.add_argument("--sample", type=int, metavar="N", help="kill at N operations of each learner, spread evenly")
    options.add_argument("--how", choices=HOW, default="kill", help="; ".join(f"{how}: {HOW[how]}" for how in HOW))
    options.add_argument("--twice", action="store_true", help="kill the resumed run as well, near its beginning")
    options.add_argument("--work", type=Path, help="folder for runs and results (default: a new one that goes)")
    return options.parse_args(argv)


def chosen_steps(arguments: argparse.Namespace, learner: Row, number: int) -> list[int]:
    """Return the steps to kill at, of so many; samples of different learners hit different operations."""
    if arguments.step is not None:
        return [step for step in arguments.step if 1 <= step <= number]
    if arguments.sample is not None:
        shift = ROWS.index(learner) * GOLDEN % 1
        return sorted({1 + int((part + shift) * number / arguments.sample) for part in range(arguments.sample)})
    return list(range(1, number + 1, arguments.every))


def run_matrices(arguments: argparse.Namespace, root: Path) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Yield for each learner its name, the number of its operations, and the results."""
    chosen = [learner for learner in ROWS if str(learner) in arguments.learner]
    for kind in {learner.kind: None for learner in chosen}:
        if not (root / f"{kind}-stream").exists():
            make_models(root / f"{kind}-stream") if kind == MODELS else make_stream(kind, root)
    for learner in chosen:
        matrix = Matrix(learner, root, arguments.how, arguments.twice)
        matrix.measure()
        done = matrix.done()
        steps = chosen_steps(arguments, learner, len(matrix.operations))
        yield matrix.name, len(matrix.operations), [done[step] if step in done else matrix.kill(step) for step in steps]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit status is 1 if anything deviates."""
    arguments = parse(argv)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as temporary:
        root = Path(temporary) if arguments.work is None else arguments.work
        root.mkdir(parents=True, exist_ok=True)
        rows = []
        for name, number, results in run_matrices(arguments, root.resolve()):
            deviating = sum(bool(result["difference"]) for result in results)
            counts.update(operations=number, kills=len(results), deviations=deviating)
            rows.append((name, number, len(results), deviating))
            print(f"{name}: {number} operations, {len(results)} kills, {deviating} deviations", flush=True)
    rows.append(("all", counts["operations"], counts["kills"], counts["deviations"]))
    print(f"\n{'run':<24}{'operations':>12}{'kills':>8}{'deviations':>12}")
    for row in rows:
        print(f"{row[0]:<24}{row[1]:>12,}{row[2]:>8,}{row[3]:>12,}")
    return int(counts["deviations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
