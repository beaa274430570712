"""Compare policies for text that arrives month by month, by tests on the held-out parts of all months so far.

    python recipes/monthly/bench.py TEXT TEXT... --out DIR [--policies all-2 update ...] [--oracle 2 4 6] [-- --cpu]

Each TEXT is the text of one month. The policy `update` calls alma-update for each month; the other policies are runs of
alma-stream on one stream of all months. Give `retrain` after a policy that determines the size of the models. After
each month DIR/results.csv gets a row: bits per byte on the held-out part of each month so far (months; mean), on the
new month before its training (before), and on the first month's test set (test). CPU seconds are user and system time
of the command. --oracle trains new models on all text up to the given months; the model with the lowest loss on valid
counts. The table is in DIR/table.md, its figure in DIR/table.png. The same command resumes a killed benchmark; the CPU
seconds of the row that the kill interrupted are those of the second command.

Hardware: two CPU cores. Time: two core hours for a stream of six months of 200,000 words, with the oracle.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Iterator, Optional, Sequence

from matplotlib import pyplot

from fairseq_alma.cli.update import BUDGET, SPLITS
from fairseq_alma.data.stream import file_sha256
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, read_json_object, write_json_atomically
from fairseq_alma.terminal import command, split_words

ALL = ["--replay", "--new-first", "1", "--passes"]
POLICIES = {
    "new-1": (["--passes", "1"], "new text only, one pass"),
    "new-2": (["--passes", "2"], "new text only, two passes"),
    "all-2": ([*ALL, "2"], "new text once, then samples of all text so far, as much as one pass of the new text"),
    "all-3": ([*ALL, "3"], "new text once, then samples of all text so far, as much as two passes of the new text"),
    "update": ([], "alma-update"),
    "retrain": ([], "a new model every month, as many tokens in all"),
}
# (passes through all text so far, multiple of the policy's number of parameters) of each oracle model.
ORACLES = [(passes, times) for passes in (1, 2, 4) for times in (1, 2)]
COLUMNS = ("policy", "seed", "arrival", "mean", "before", "test", "valid", "params", "flops", "cpu_seconds", "months")


def run_command(program: str, *words: object) -> float:
    """Run a command of this environment, with its output on standard error; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([Path(sys.executable).with_name(program), *map(str, words)], stdout=sys.stderr)
    if done.returncode:
        raise AlmaError(f"{program} failed (exit status {done.returncode}); run the same command again to resume")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read_rows(results: Path) -> list[dict[str, str]]:
    """Return the rows of ``results.csv``, one for each completed arrival of each policy and seed."""
    text = results.read_text(encoding="utf-8") if results.is_file() else ""
    return [*csv.DictReader(text[: text.rfind("\n") + 1].splitlines())]  # without a line that a kill cut off


def has_row(results: Path, policy: str, seed: int, arrival: int) -> bool:
    """Return whether an arrival of a policy and seed has a row."""
    key = [policy, str(seed), str(arrival)]
    return any([row[name] for name in COLUMNS[:3]] == key for row in read_rows(results))


def largest_size(results: Path, arrival: int) -> int:
    """Return the maximum number of parameters of the policies after an arrival, without `retrain`."""
    rows = [row for row in read_rows(results) if row["policy"] in POLICIES and row["policy"] != "retrain"]
    sizes = [int(row["params"]) for row in rows if row["arrival"] == str(arrival)]
    if not sizes:
        sys.exit("retrain, --oracle: the sizes of other policies are missing; give another policy before retrain")
    return max(sizes)


def add_row(results: Path, stage: Path, key: tuple[str, int, int], before: Optional[float], seconds: float) -> None:
    """Add a row for ``key`` (policy, seed, arrival) with the results in a stage folder."""
    record = json.loads((stage / "stage.json").read_text(encoding="utf-8"))
    months = [each["bits_per_byte"] for each in record["holdouts"] if each["megabatch"] <= key[-1]]
    losses = (fmean(months), before, *(record[name]["bits_per_byte"] for name in ("test", "valid")))
    values = [*key, *("" if loss is None else f"{loss:.4f}" for loss in losses)]
    values += [record["num_params"], f"{record['train_flops']:.4g}", f"{seconds:.1f}"]
    row = dict(zip(COLUMNS, [*map(str, values), " ".join(f"{each:.4f}" for each in months)], strict=True))
    rows = [*read_rows(results), row]
    with open_atomically(results, "w") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(" ".join(f"{name} {row[name]}" for name in COLUMNS[:-1]), flush=True)


def run_policy(
    policy: str, seed: int, texts: Sequence[Path], stream: Path, results: Path, words: Sequence[str]
) -> None:
    """Run a policy over all arrivals, with one command for each arrival."""
    run = results.parent / f"{policy}-seed-{seed}"
    so_far = [*accumulate(text.stat().st_size for text in texts)]
    for arrival, text in enumerate(texts):
        if policy == "retrain":
            passes = round(BUDGET * so_far[-1] / sum(so_far), 3)
            train_anew(policy, arrival, seed, passes, largest_size(results, arrival), stream, results, words)
            continue
        if has_row(results, policy, seed, arrival):
            continue
        if policy == "update":
            seconds = run_command("alma-update", run, text, *(["--", *words] if words and not arrival else []))
            month = json.loads((run / "update.json").read_text(encoding="utf-8"))["months"][arrival]
            stage, before = run / f"run/stage-{arrival - month['first']:03d}", month.get("before")
        else:
            own = ["--stream", stream, "--run", run, "--seed", seed, "--stage", arrival, *POLICIES[policy][0]]
            seconds = run_command("alma-stream", *own, "--", *words)
            stage = run / f"stage-{arrival:03d}"
            new = json.loads((stage / "stage.json").read_text(encoding="utf-8"))["holdouts"][-1]
            before = (new["before"] or {}).get("bits_per_byte")
        add_row(results, stage, (policy, seed, arrival), before, seconds)


def train_anew(
    name: str, arrival: int, seed: int, passes: float, size: int, stream: Path, results: Path, words: Sequence[str]
) -> None:
    """Train a new model on all text up to an arrival (from 0)."""
    if not has_row(results, name, seed, arrival):
        run = results.parent / f"{name}-{arrival + 1}-seed-{seed}"
        own = ["--stream", stream, "--run", run, "--seed", seed, "--first-wait", arrival + 1, "--stage", 0]
        seconds = run_command("alma-stream", *own, "--passes", passes, "--size", size, "--", *words)
        add_row(results, run / "stage-000", (name, seed, arrival), None, seconds)


def table(rows: Sequence[dict[str, str]], num_arrivals: int) -> Iterator[str]:
    """Yield the lines of the table: the mean after each arrival, and the difference from the oracle if known."""
    arrivals = [str(arrival) for arrival in range(num_arrivals)]
    oracles = [row for row in rows if row["policy"].startswith("oracle")]
    best = {row["arrival"]: float(row["mean"]) for row in sorted(oracles, key=lambda row: -float(row["valid"]))}
    after = " | ".join(f"after {t + 1}" for t in range(num_arrivals))
    yield f"| policy | total CPU s | total TFLOPs | {after} | first test |"
    yield "|---|" + "---:|" * (num_arrivals + 3)
    for policy in dict.fromkeys(row["policy"] for row in rows if row not in oracles):
        own = [row for row in rows if row["policy"] == policy]
        cells = []
        for arrival in arrivals:
            means = [float(row["mean"]) for row in own if row["arrival"] == arrival]
            percent = 100 * (fmean(means) / best[arrival] - 1) if means and arrival in best else None
            cells.append(f"{fmean(means):.3f}" if means else "")
            cells[-1] += "" if percent is None else f" ({percent:+.1f} %)"
        num_seeds = len({row["seed"] for row in own})
        seconds, flops = (sum(float(row[name]) for row in own) / num_seeds for name in ("cpu_seconds", "flops"))
        test = fmean(float(row["test"]) for row in own if row["arrival"] == own[-1]["arrival"])
        yield f"| {POLICIES[policy][1]} | {seconds:.0f} | {flops / 1e12:.3g} | {' | '.join(cells)} | {test:.3f} |"
    if best:
        cells = [f"{best[arrival]:.3f}" if arrival in best else "" for arrival in arrivals]
        seconds, flops = (sum(float(row[name]) for row in oracles) for name in ("cpu_seconds", "flops"))
        label = f"oracle: best of {len(ORACLES)} new models"
        yield f"| {label} | {seconds:.0f} | {flops / 1e12:.3g} | {' | '.join(cells)} | |"


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Draw the mean over the months so far after each month: a line for the first seed of a policy, or crosses."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        own = [row for row in own if row["seed"] == own[0]["seed"]]
        style, label = ("o-", POLICIES[policy][1]) if policy in POLICIES else ("kx", policy.replace("-", " "))
        label += f" ({int(own[-1]['params']) / 1e6:.2g} M parameters)"
        axes.plot([1 + int(row["arrival"]) for row in own], [float(row["mean"]) for row in own], style, label=label)
    axes.set(xlabel="months", ylabel="bits per byte (mean of months)")
    figure.legend(loc="outside upper left", frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the benchmark."""
    own_words, words = split_words(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["new-1", "all-2", "update"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    about = "train oracle models for these months (from 1)"
    parser.add_argument("--oracle", nargs="*", type=int, default=[], metavar="MONTH", help=about)
    options = parser.parse_args(own_words)
    if "update" in options.policies and options.seeds != [1]:
        parser.error("--seeds: alma-update has only seed 1; give --seeds 1, or --policies without update")
    if any(not 1 <= month <= len(options.texts) for month in options.oracle):
        parser.error(f"--oracle: expected months from 1 to {len(options.texts)}")
    asked, known = {"texts": [*map(file_sha256, options.texts)], "options": words}, options.out / "settings.json"
    if known.exists() and read_json_object(known, "give another --out") != asked:
        raise AlmaError(f"{known}: the benchmark began with other texts or other options after --; give another --out")
    write_json_atomically(known, asked)
    results, stream = options.out / "results.csv", options.out / "stream"
    manifest = stream / "stream.json"
    num_known = len(json.loads(manifest.read_text(encoding="utf-8"))["history"]) if manifest.is_file() else 0
    for number, text in enumerate(options.texts[num_known:], start=num_known):
        how = ["--append"] if number else SPLITS
        run_command("alma-prep-text", text, "--out", stream, "--megabatches", 1, *how)
    for seed in options.seeds:
        for policy in options.policies:
            run_policy(policy, seed, options.texts, stream, results, words)
    for month in options.oracle:
        for passes, times in ORACLES:
            name, size = f"oracle-{passes}-passes-{times}x", times * largest_size(results, month - 1)
            train_anew(name, month - 1, options.seeds[0], passes, size, stream, results, words)
    rows = read_rows(results)
    lines = "\n".join(table(rows, len(options.texts)))
    (options.out / "table.md").write_text(f"{lines}\n", encoding="utf-8")
    draw(rows, options.out / "table.png")
    print(lines)


if __name__ == "__main__":
    sys.exit(main(None))
