"""Compare what to do when text arrives month by month, on held-out parts of every month so far.

    python recipes/monthly/bench.py TEXT TEXT... --out DIR [--policies all-2 update ...] [--seeds 1] [-- --cpu]

TEXT are the months in order. One stream is made of them, and each policy is a run over it; `update` is alma-update.
After each arrival: bits per byte, mean over the held-out parts of all months so far; on the next month; on the first
month's test; CPU seconds of the whole command, user and system. The oracle is the best of some new models on all text
so far (``--oracle 2 4 6``: arrivals), chosen on valid. A killed benchmark resumes with the same command.

Hardware: two CPU cores. Time: two core hours for each stream of six months of 200,000 words, with the oracle.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

SPLITS = ["--valid-bytes", "3%", "--test-bytes", "5%", "--holdout-bytes", "2%"]
DRAW = ["--replay", "--passes-of-new"]
POLICIES = {
    "new-1": (["--passes", "1"], "new text alone, one pass"),
    "new-2": (["--passes", "2"], "new text alone, two passes"),
    "half-1": (["--passes", "1", "--replay-share", "0.5"], "one pass of the new text, half of each update is old text"),
    "all-1": ([*DRAW, "--passes", "1"], "draws from all text so far, updates for one pass of the new"),
    "all-2": ([*DRAW, "--passes", "2"], "draws from all text so far, updates for two passes of the new"),
    "all-3": ([*DRAW, "--passes", "3"], "draws from all text so far, updates for three passes of the new"),
    "update": ([], "alma-update: three passes, a larger model where a large month pays for it"),
}
ORACLE_PASSES, ORACLE_SIZES = (1, 2, 4), (1, 2)
"""Passes through all text so far, and multiples of the policy's number of parameters."""
COLUMNS = ("policy", "seed", "arrival", "mean", "next", "test", "valid", "params", "flops", "cpu_seconds", "months")


def command(*words: object) -> float:
    """Run a command of this environment; return its CPU seconds. What it prints goes to standard error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program, *rest = map(str, words)
    path = Path(sys.executable).with_name(program)
    subprocess.run([path, *rest], check=True, stdout=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Results:
    """Rows of ``results.csv``, each written once its arrival is complete.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.is_file():
            with open(path, encoding="utf-8", newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if None not in row.values()]

    def find(self, policy: str, seed: int, arrival: int) -> Optional[Mapping[str, Any]]:
        """Return a row; None: there is none yet."""
        key = (policy, str(seed), str(arrival))
        return next((row for row in self.rows if (row["policy"], row["seed"], row["arrival"]) == key), None)

    def add(self, **row: Any) -> None:
        """Write a row."""
        self.rows.append({name: str(row.get(name, "")) for name in COLUMNS})
        new = self.path.with_suffix(".tmp")
        with open(new, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(new, self.path)
        print(" ".join(f"{name} {row[name]}" for name in COLUMNS[:-1] if row.get(name) not in (None, "")), flush=True)


def figures(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a stage.json has."""
    months = [each["bits_per_byte"] for each in stage["holdouts"]]
    mean = sum(months) / len(months)
    shown = {"mean": f"{mean:.4f}", "months": " ".join(f"{each:.4f}" for each in months)}
    shown |= {name: f"{stage[name]['bits_per_byte']:.4f}" for name in ("test", "valid")}
    return {**shown, "params": stage["num_params"], "flops": f"{stage['train_flops']:.4g}"}


def read_stage(run: Path, stage: int) -> dict[str, Any]:
    """Read a stage.json."""
    return json.loads((run / f"stage-{stage:03d}" / "stage.json").read_text(encoding="utf-8"))


def add_what_comes(results: Results, policy: str, seed: int, arrival: int, loss: Any) -> None:
    """Fill in what the model after an arrival was worth on the next month, which is known one arrival later."""
    row = results.find(policy, seed, arrival)
    if row is not None and loss is not None:
        row["next"] = f"{loss:.4f}"  # type: ignore[index]


def run_policy(
    name: str, seed: int, texts: Sequence[Path], stream: Path, results: Results, words: Sequence[str]
) -> None:
    """Run a policy over all arrivals, one command for each, as the months would come."""
    run = results.path.parent / f"{name}-seed-{seed}"
    options, _ = POLICIES[name]
    for arrival, text in enumerate(texts):
        if results.find(name, seed, arrival) is not None:
            continue
        if name == "update":
            first = ["--", *words] if words and not arrival else []
            seconds = command("alma-update", run, text, *first)
            month = json.loads((run / "update.json").read_text())["months"][arrival]
            stage, before = read_stage(run / "run", arrival - month["first"]), month.get("before")
        else:
            own = ["--stream", stream, "--run", run, "--seed", seed, "--stage", arrival, *options]
            seconds = command("alma-stream", *own, "--", *words)
            stage = read_stage(run, arrival)
            before = (stage["holdouts"][-1]["before"] or {}).get("bits_per_byte")
        add_what_comes(results, name, seed, arrival - 1, before)
        results.add(policy=name, seed=seed, arrival=arrival, cpu_seconds=round(seconds, 1), **figures(stage))


def run_oracle(arrival: int, seed: int, size: int, stream: Path, results: Results, words: Sequence[str]) -> None:
    """Train new models on all text so far, each with as many passes and parameters as `ORACLE_PASSES` and sizes say.

    Args:
        arrival: from 1.
        seed: of the runs.
        size: parameters of the policy's model.
        stream: what is learned from.
        results: get a row for each.
        words: options after ``--``.
    """
    for passes in ORACLE_PASSES:
        for times in ORACLE_SIZES:
            name = f"oracle-{passes}-passes-{times}x"
            if results.find(name, seed, arrival - 1) is not None:
                continue
            run = results.path.parent / f"{name}-{arrival}-seed-{seed}"
            own = ["--stream", stream, "--run", run, "--seed", seed, "--first-wait", arrival, "--stage", 0]
            seconds = command("alma-stream", *own, "--passes", passes, "--size", times * size, "--", *words)
            stage = read_stage(run, 0)
            stage["holdouts"] = stage["holdouts"][:arrival]
            results.add(policy=name, seed=seed, arrival=arrival - 1, cpu_seconds=round(seconds, 1), **figures(stage))


def table(results: Results, num_arrivals: int) -> Iterator[str]:
    """Yield the lines of the table: for each policy the mean after each arrival, relative to the oracle where known."""
    best = {}
    for arrival in range(num_arrivals):
        rows = [row for row in results.rows if row["policy"].startswith("oracle") and row["arrival"] == str(arrival)]
        if rows:
            best[arrival] = float(min(rows, key=lambda row: float(row["valid"]))["mean"])
    yield "| policy | CPU s in all | " + " | ".join(f"after {t + 1}" for t in range(num_arrivals)) + " | first test |"
    yield "|---|---:|" + "---:|" * (num_arrivals + 1)
    for name in dict.fromkeys(row["policy"] for row in results.rows if not row["policy"].startswith("oracle")):
        rows = [row for row in results.rows if row["policy"] == name]
        cells = []
        for arrival in range(num_arrivals):
            found = [float(row["mean"]) for row in rows if row["arrival"] == str(arrival)]
            mean = sum(found) / len(found) if found else None
            to_best = f" ({100 * (mean / best[arrival] - 1):+.1f} %)" if mean and arrival in best else ""
            cells.append("" if mean is None else f"{mean:.3f}{to_best}")
        seconds = sum(float(row["cpu_seconds"]) for row in rows) / len({row["seed"] for row in rows})
        last = max(rows, key=lambda row: int(row["arrival"]))
        yield f"| {POLICIES[name][1]} | {seconds:.0f} | {' | '.join(cells)} | {float(last['test']):.3f} |"
    if best:
        cells = [f"{best[t]:.3f}" if t in best else "" for t in range(num_arrivals)]
        seconds = sum(float(row["cpu_seconds"]) for row in results.rows if row["policy"].startswith("oracle"))
        name = f"oracle: best of {len(ORACLE_PASSES) * len(ORACLE_SIZES)} new models"
        yield f"| {name} | {seconds:.0f} | {' | '.join(cells)} | |"


def main() -> None:
    """Run the benchmark."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["new-1", "all-2", "update"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--oracle", nargs="*", type=int, default=[], metavar="ARRIVAL", help="from 1")
    options, words = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    options.out.mkdir(parents=True, exist_ok=True)
    results, stream = Results(options.out / "results.csv"), options.out / "stream"
    manifest = stream / "stream.json"
    for number, text in enumerate(options.texts):
        known = len(json.loads(manifest.read_text())["history"]) if manifest.is_file() else 0
        if number >= known:
            how = ["--append"] if number else [*SPLITS, "--vocab-size", "auto"]
            command("alma-prep-text", text, "--out", stream, "--megabatches", 1, *how)
    for seed in options.seeds:
        for name in options.policies:
            run_policy(name, seed, options.texts, stream, results, words)
    for arrival in options.oracle:
        rows = [row for row in results.rows if row["arrival"] == str(arrival - 1) and row["policy"] in POLICIES]
        run_oracle(arrival, options.seeds[0], max(int(row["params"]) for row in rows), stream, results, words)
    lines = [*table(results, len(options.texts))]
    (options.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
