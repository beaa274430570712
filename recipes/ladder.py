"""The language study at the paper's ratios, on a ladder of sizes: rows of Tables 1 and 2, and anytime training.

    TEXT="wiki.00.txt.xz wiki.01.txt.xz" recipes/lm/ladder/ladder.sh --width 16                 # the main rows
    TEXT=... recipes/lm/ladder/ladder.sh --width 24 --rows table2 --seeds 1 2 3
    recipes/lm/ladder/ladder.sh --width 16 --corpus python --rows depth    # source code of Python's standard library
    recipes/lm/ladder/ladder.sh --width 16 --dry-run                   # tokens, passes, hours; what is left to train

A family of models: two layers of width d, the second a Switch layer with 4 experts, an FFN and experts of 4 d, heads of
8, a vocabulary of 32 d. Each of 4 mega-batches has 9 tokens for each parameter of the model with 4 experts, as in the
paper, and 10 passes are made over it; ``--passes 20`` is what the paper makes. Paragraphs are dealt at random.
``recipes/lm/ladder/README.md`` has the claims, what would falsify them, and the results; ``ladder_tables.py`` lays
them out.

One run at a time, a thread each: the same command given several times shares the work. A run is ROW-lrLR-seedN. Each
row tries all rates with the first seed, first that which was best for ``sm-4`` (or the first row, where that was not
tried), so that a study that was cut off has something of all rows; the other seeds get the one with the lowest loss on
valid, its mean over the arrivals (``rates.json``), and are trained side by side in one process. What has ended is not
trained again, nor is what ``records/lm-ladder-WIDTH.tar.xz`` (another corpus or number of passes:
``lm-ladder-WIDTH-CORPUS-N-passes.tar.xz``) has of the same stream (``tables.py --add --keep lm-ladder-16
runs/lm-ladder/16/*-seed*`` adds to it).
"""

import argparse
import ast
import fcntl
import json
import lzma
import os
import random
import shlex
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Callable, Collection, Iterator, NamedTuple, Optional, Sequence

import arms

from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, write_json_atomically
from fairseq_alma.options import InRange, whole
from fairseq_alma.report.read_run import RunTable, read_run

WIKIPEDIA, PYTHON, SHIFT = "wikipedia", "python", "shift"
TOKENS_PER_WORD = {
    WIKIPEDIA: {16: 3.14, 24: 2.75, 32: 2.54, 48: 2.30, 64: 2.15},
    PYTHON: {16: 4.48},
    SHIFT: {16: 5.35},
}
"""Corpora -> widths -> tokens for each word with the vocabulary of that width, ends of documents too."""
CODE_NGRAM = 50  # words that code has to share with test to be a copy of it; of text alma-prep-text's own 13
TOKENS_PER_PARAMETER, PASSES, MEGABATCHES = 9, 10, 4
BATCH, SAMPLE, EXPERTS = 16, 128, 4
VALID_WORDS, TEST_WORDS = 20_000, 40_000
RATES_AT_16 = (0.008, 0.016, 0.032, 0.064)
DECAY, CONSTANT, INVERSE_ROOT = "polynomial_decay", "fixed", "inverse_sqrt"  # as fairseq calls them
WARMUP_SHARE = {DECAY: 0.03, CONSTANT: 0.03, INVERSE_ROOT: 0.1}  # of a mega-batch's updates; there the peak lies
SECONDS_A_STAGE = 8.0  # of a core, beside the updates: commands that start, tests
POLL_SECONDS = 10.0


@dataclass(frozen=True)
class Row:
    """A row of a table: what is trained.

    Attributes:
        options: of alma-stream.
        experts: in the Switch layer; None: the learner says, or there is none.
        layers: of the decoder; None: the learner says.
        halves: of the rung's width, which is the width of this model: one, or one for each arrival.
        times: updates of a stage, of those for one mega-batch.
        scheduler: of the rate: decays to zero in each stage, or warms up once and then stays up or falls.
        train: further options of fairseq-train.
        tuned_as: the row whose rate it has, as that is the same training with another seed; None: it is tuned itself.
        cost: updates of the whole run, in those for one mega-batch.
    """

    options: str = "--learner sm"
    experts: Optional[int] = EXPERTS
    layers: Optional[int] = 2
    halves: tuple[int, ...] = (2,)
    times: int = 1
    scheduler: str = DECAY
    train: str = ""
    tuned_as: Optional[str] = None
    cost: float = MEGABATCHES


def _waiting(name: str, options: str, experts: int, times: int) -> dict[str, Row]:
    """Return a row that waits, with the updates of one mega-batch, and with those of all that it waits for.

    With 4 experts the second is retraining: ``ens-2-iid3`` is to the bit what ``ens-2-w3`` with 3 times the updates is.
    """
    return {
        name: Row(f"{_SM} {options}", experts, cost=1),
        f"{name}-x{times}": Row(f"{_SM} {options}", experts, times=times, cost=times),
    }


_SM, _ENS = "--learner sm", "--learner ens --num-members"
_WAIT_3, _WAIT_4 = "--wait 3 --drop-rest", "--wait 4"
_EMA, _BRANCH = "--ema-half-life 1/16", "--branch-decay 0.2 --branch-continue"
_GROW = "--learner gmoe --grow-schedule 4,6,8,12"
_DECAYED = "--weight-decay 0.1"
_CARRIED = f"--carry-optimizer {_EMA}"
_DENSE = "--moe-freq 0"
SMALLEST, LARGEST = 1, 6
FIXED = tuple(f"depth-{layers}" for layers in (SMALLEST, 3, LARGEST))
_DEPTHS = {  # what grows -> its options
    "deeper-1-6-6-6": "layers=1,6,6,6", "deeper-1-1-6-6": "layers=1,1,6,6", "deeper-1-1-1-6": "layers=1,1,1,6",
    "deeper-1-1-6-6-last": "layers=1,1,6,6 --grow-method last", "deeper-auto": "layers=1,6 --grow-when auto",
}  # fmt: skip
FIXED_WIDTHS = ("width-1", "width-2", "width-4")
_WIDTHS = ((1, 1, 4, 4), (1, 1, 1, 4), (1, 4, 4, 4))  # halves of the rung's width at each arrival

ROWS: dict[str, Row] = {
    "sm-4": Row(), "sm-8": Row(experts=8), "sm-12": Row(experts=12),
    **_waiting("sm-8-w3", _WAIT_3, experts=8, times=3), **_waiting("sm-12-w4", _WAIT_4, experts=12, times=4),
    "ens-2": Row(f"{_ENS} 2", tuned_as="sm-4", cost=8), "ens-4": Row(f"{_ENS} 4", tuned_as="sm-4", cost=16),
    "ens-2-w3": Row(f"{_ENS} 2 {_WAIT_3}", cost=2), "ens-2-w4": Row(f"{_ENS} 2 {_WAIT_4}", cost=2),
    "gens": Row("--learner gens"), "gens-last": Row("--learner gens --init previous"),
    "gmoe-copy": Row(_GROW, None), "gmoe-noise": Row(f"{_GROW} --grow-noise 0.01", None),
    "gmoe-split": Row(f"{_GROW} --grow-method split", None),
    "gmoe-renew": Row(f"{_GROW} --grow-renew-share 0.25", None),
    "gmoe-worst": Row(f"{_GROW} --grow-select worst", None),
    "gmoe-early": Row("--learner gmoe --grow-schedule 4,8,12,12", None),
    **{f"sm-4-iid{k}": Row(f"{_SM} --iid {k}", cost=k) for k in (2, 3, 4)},
    **{f"ens-2-iid{k}": Row(f"{_ENS} 2 --iid {k}", tuned_as=f"sm-4-iid{k}", cost=2 * k) for k in (3, 4)},
    **{f"sm-4-ema-iid{k}": Row(f"{_SM} --iid {k} {_EMA}", scheduler=CONSTANT, cost=k) for k in (2, 3, 4)},
    **{f"sm-4-wsd-iid{k}": Row(f"{_SM} --iid {k} {_BRANCH}", scheduler=CONSTANT, cost=k) for k in (2, 3, 4)},
    **{f"sm-4-wd-iid{k}": Row(f"{_SM} --iid {k}", train=_DECAYED, cost=k) for k in (2, 3, 4)},
    "sm-4-wd": Row(train=_DECAYED),
    **{
        name: Row(f"{_SM} --carry-optimizer {options}", scheduler=CONSTANT, train=train)
        for name, options, train in (
            ("ema", _EMA, ""), ("ema-union", f"{_EMA} --replay", ""),
            ("ema-least-seen", f"{_EMA} --replay-share 0.5 --replay-order least-seen", ""),
            ("ema-wd", _EMA, _DECAYED), ("ema-union-wd", f"{_EMA} --replay", _DECAYED),
            ("wsd-10", "--branch-share 0.1", ""), ("wsd-20", "--branch-share 0.2", ""),
            ("wsd-10-union", "--branch-share 0.1 --replay", ""), ("wsd-20-union", "--branch-share 0.2 --replay", ""),
        )
    },
    "sqrt-20-union": Row(f"{_SM} --carry-optimizer --branch-share 0.2 --replay", scheduler=INVERSE_ROOT),
    **{
        name: Row(f"{_SM} {_CARRIED}", None, layers=int(name[-1]), scheduler=CONSTANT, train=_DENSE,
                  cost=MEGABATCHES * (1 + int(name[-1])) / 3)
        for name in FIXED
    },
    **{
        name: Row(f"--learner grow --grow-schedule {schedule} {_CARRIED}", None, layers=None, scheduler=CONSTANT,
                  train=_DENSE, cost=6)
        for name, schedule in _DEPTHS.items()
    },
    **{
        name: Row(f"{_SM} {_CARRIED}", None, halves=(int(name[-1]),), scheduler=CONSTANT, train=_DENSE)
        for name in FIXED_WIDTHS
    },
    **{
        f"wider-{'-'.join(map(str, halves))}": Row(f"--learner grow {_CARRIED}", None, halves=halves, train=_DENSE,
                                                   scheduler=CONSTANT)
        for halves in _WIDTHS
    },
}  # fmt: skip
"""What is trained at each size, in the order of the tables."""
RETRAINED = ("sm-4-iid", "sm-4-ema-iid", "sm-4-wsd-iid", "sm-4-wd-iid")
"""Oracles: trainings on all so far at once, for each arrival after the first."""
MAIN = (
    "sm-4", "sm-12", "gmoe-copy", "gmoe-split", "ens-2", "sm-4-iid4", "ens-2-iid4", "ema", "ema-union", "sm-4-ema-iid4",
)  # fmt: skip
SETS: dict[str, tuple[str, ...]] = {
    "main": MAIN,
    "table1": ("ens-2", "ens-2-iid3", "ens-2-iid4"),
    "experts": ("gmoe-copy", "gmoe-renew", "gmoe-split", "gmoe-worst", "gmoe-early", "gmoe-noise"),
    "depth": ("depth-6", "deeper-1-1-6-6", "depth-1", "deeper-1-1-1-6", "depth-3", "deeper-1-6-6-6",
              "deeper-1-1-6-6-last", "deeper-auto"),
    "width": ("width-4", "wider-1-1-4-4", "width-2", "width-1", "wider-1-1-1-4", "wider-1-4-4-4"),
    "table2": (*tuple(ROWS)[: list(ROWS).index("sm-4-iid2")], "ens-2-iid3", "ens-2-iid4"),
    "anytime": tuple(
        name
        for name, row in ROWS.items()
        if (row.scheduler != DECAY and row.experts) or "-wd" in name or name.startswith("sm-4")
    ),
    "shift": ("sm-4", "ema", "ema-union", "sm-4-wsd-iid4", "sm-4-ema-iid4", "sm-4-iid4", "ema-least-seen",
              "wsd-20-union"),
    "all": tuple(ROWS),
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A rung of the ladder.

    Attributes:
        width: of the model.
        corpus: what it is trained on.
        passes: over each mega-batch.
    """

    width: int
    corpus: str = WIKIPEDIA
    passes: int = PASSES

    @property
    def vocabulary(self) -> int:
        """Tokens."""
        return 32 * self.width

    @property
    def num_params(self) -> int:
        """Parameters of the model with 4 experts."""
        return 80 * self.width**2 + 181 * self.width

    @property
    def tokens(self) -> int:
        """Tokens of a mega-batch."""
        return TOKENS_PER_PARAMETER * self.num_params

    @property
    def words(self) -> int:
        """Words of text that are needed in all."""
        return round(MEGABATCHES * self.tokens / TOKENS_PER_WORD[self.corpus][self.width]) + VALID_WORDS + TEST_WORDS

    @property
    def updates(self) -> int:
        """Updates for a mega-batch."""
        return round(self.passes * self.tokens / (BATCH * SAMPLE))

    @property
    def rates(self) -> list[str]:
        """Peak learning rates to choose from."""
        return [f"{rate * (16 / self.width) ** 0.5:.2g}" for rate in RATES_AT_16]

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a core trains on in a second: 60,000 at width 16, 20,000 at 64, measured on one of 2024."""
        return 60_000 * (16 / self.width) ** 0.8

    @property
    def name(self) -> str:
        """Of its folder."""
        corpus = "" if self.corpus == WIKIPEDIA else f"-{self.corpus}"
        passes = "" if self.passes == PASSES else f"-{self.passes}-passes"
        return f"{self.width}{corpus}{passes}"

    @property
    def archive(self) -> str:
        """Name of the kept records."""
        return f"lm-ladder-{self.name}"

    def seconds(self, row: Row) -> float:
        """Return about how long a run takes a core."""
        return row.cost * (self.updates * BATCH * SAMPLE / self.tokens_per_second + SECONDS_A_STAGE)


@dataclass(frozen=True)
class Training:
    """A run: a row with a learning rate and a seed."""

    row: str
    rate: str
    seed: int

    @property
    def arm(self) -> str:
        """What its name has beside the seed."""
        return f"{self.row}-lr{self.rate}"

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm}-seed{self.seed}"

    def together(self, todo: Sequence["Training"]) -> list["Training"]:
        """Return those that one command trains side by side with this one: they differ by their seeds."""
        is_own = "--grow-when auto" in ROWS[self.row].options  # seeds would not grow at the same time
        return [self] if is_own else [each for each in todo if each.arm == self.arm]


Ended = dict[tuple[str, str, int], arms.Run]


def kept(size: Size) -> Optional[RunTable]:
    """Return the complete runs of which there are records, None if there are none."""
    import tables  # which shows what is here

    if size.archive not in tables.names():
        return None
    runs = tables.read(size.archive)
    return runs.where(runs.facts.is_complete)


def complete_runs(folder: Path) -> Optional[RunTable]:
    """Return the complete runs in a folder, None if there are none."""
    paths = [path.parent for path in sorted(folder.glob("*-seed*/run.json"))]
    runs = RunTable.of(map(read_run, paths)) if paths else None
    return None if runs is None else runs.where(runs.facts.is_complete)


def ended(*found: Optional[RunTable]) -> Ended:
    """Gather runs into what each came to."""
    return {
        key: run for runs in found if runs is not None and len(runs.facts) for key, run in arms.arms_of(runs).items()
    }


def best_rates(done: Ended, seed: int, rates: Sequence[str], failed: Collection[str] = ()) -> dict[str, str]:
    """Return the rate of each row of which, with the first seed, every rate has ended or failed, one at least ended."""
    best = {}
    for name, row in ROWS.items():
        tried = {rate: (name, rate, seed) in done for rate in rates}
        is_tried = all(has or Training(name, rate, seed).name in failed for rate, has in tried.items())
        if row.tuned_as is None and any(tried.values()) and is_tried:
            best[name] = arms.best_lr({key: run for key, run in done.items() if key[1] in rates}, name, seed)
    return best | {name: best[row.tuned_as] for name, row in ROWS.items() if row.tuned_as in best}


def wanted(names: Sequence[str], best: dict[str, str], rates: Sequence[str], seeds: Sequence[int]) -> list[Training]:
    """Return the trainings that can be named so far, in the order in which they are made."""
    tuned = list(dict.fromkeys(ROWS[name].tuned_as or name for name in names))
    guide = "sm-4" if "sm-4" in {*tuned, *best} else tuned[0]
    found = [Training(guide, rate, seeds[0]) for rate in rates]
    if guide in best:
        found += [Training(name, best[guide], seeds[0]) for name in tuned]
        found += [Training(name, best[name], seeds[0]) for name in names if name in best and name not in tuned]
    found += [Training(name, rate, seeds[0]) for name, rate in product(tuned, rates)]
    found += [Training(name, best[name], seed) for seed, name in product(seeds, names) if name in best]
    return list(dict.fromkeys(found))


class Study:
    """A size of the ladder on this machine.

    Args:
        size: the size.
        folder: where its text, stream and runs lie.
        rates: to choose from.
        seeds: the first one chooses.
    """

    def __init__(self, size: Size, folder: Path, rates: Sequence[str], seeds: Sequence[int]) -> None:
        self.size, self.folder, self.rates, self.seeds = size, folder, rates, seeds
        self.failed: dict[str, str] = {}
        self._kept = kept(size)

    @property
    def stream(self) -> Path:
        """The stream's folder."""
        return self.folder / "stream"

    def prepare(self, text: Sequence[Path]) -> None:
        """Make the stream, unless it is there. Raises AlmaError if there is too little text."""
        if not (self.stream / "stream.json").is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            with Claim(self.folder / "stream.lock", wait=True):
                if not (self.stream / "stream.json").is_file():
                    _write_words(text, self.size, self.folder / "text.txt")
                    subprocess.run(self._prep(), check=True)
        stream = Stream.open(self.stream)
        if self._kept is not None and {stream.fingerprint} != {each["fingerprint"] for each in self._kept.facts.stream}:
            print(f"records/{self.size.archive}: of another stream; nothing of it counts here", file=sys.stderr)
            self._kept = None

    def _prep(self) -> list[str]:
        dealt = ["--by", "megabatch"] if self.size.corpus == SHIFT else ["--megabatches", str(MEGABATCHES)]
        size = [*dealt, "--vocab-size", str(self.size.vocabulary), "--workers", "1"]
        held = ["--valid-words", str(VALID_WORDS), "--test-words", str(TEST_WORDS)]
        kind = ["lines"] if self.size.corpus == WIKIPEDIA else ["jsonl", "--decontaminate-ngram", str(CODE_NGRAM)]
        paths = [str(self.folder / "text.txt"), "--out", str(self.stream), "--format", *kind]
        return ["alma-prep-text", *paths, *size, *held]

    def ended(self) -> Ended:
        """Return what has ended here, or is kept; a training that diverged or failed counts as one that never does."""
        return ended(self._kept, complete_runs(self.folder))

    def best_rates(self, done: Ended) -> dict[str, str]:
        """Choose the rates of all rows of which enough has ended, and write the choice down."""
        best = best_rates(done, self.seeds[0], self.rates, self.failed)
        if best and self.folder.is_dir():
            write_json_atomically(self.folder / "rates.json", {"candidates": list(self.rates), "chosen": best})
        return best

    def command(self, *trainings: Training) -> list[str]:
        """Return the call of alma-stream for a training, or for several that differ by their seeds."""
        training, size = trainings[0], self.size
        row, seeds = ROWS[training.row], [str(each.seed) for each in trainings]
        updates = size.updates * row.times
        widths = [each * size.width // 2 for each in row.halves]
        model = ["--arch", "alma_switch_lm", "--decoder-attention-heads", str(widths[0] // 8)]
        model += ["--decoder-layers", str(row.layers)] if row.layers else []
        if len(widths) == 1:
            model += ["--decoder-embed-dim", str(widths[0]), "--decoder-ffn-embed-dim", str(4 * widths[0])]
        model += ["--dropout", "0", *(["--num-experts", str(row.experts)] if row.experts else [])]
        schedule = ["--lr-scheduler", row.scheduler]
        if row.scheduler == DECAY:
            schedule += ["--total-num-update", str(updates)]
        warmup = round(WARMUP_SHARE[row.scheduler] * size.updates)
        schedule += ["--lr", training.rate, "--warmup-updates", str(warmup), "--max-update", str(updates)]
        optimizer = ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-8", "--clip-norm", "1.0"]
        data = ["--tokens-per-sample", str(SAMPLE), "--batch-size", str(BATCH), "--num-workers", "0", "--cpu"]
        own = [
            "--stream",
            str(self.stream),
            "--megabatches",
            str(MEGABATCHES),
            "--run",
            str(self._run_folder(trainings)),
        ]
        own += ["--seed", *seeds, "--save-every", "5000", *row.options.split()]
        if len(widths) > 1:
            schedule_of = {"embed-dim": widths, "ffn-dim": [4 * width for width in widths]}
            spelled = (f"{name}={','.join(map(str, sizes))}" for name, sizes in schedule_of.items())
            own += ["--grow-schedule", " ".join(spelled)]
        loss = ["--criterion", "alma_switch_cross_entropy"]
        return ["alma-stream", *own, "--", *model, *loss, *optimizer, *row.train.split(), *schedule, *data]

    def _run_folder(self, trainings: Sequence[Training]) -> Path:
        if len(trainings) == 1:
            return self.folder / trainings[0].name
        return self.folder / f"{trainings[0].arm}-together-{'-'.join(str(each.seed) for each in trainings)}"

    def left(self, names: Sequence[str]) -> tuple[list[Training], dict[str, str]]:
        """Return what is to be trained as far as is known, and the chosen rates."""
        done = self.ended()
        best = self.best_rates(done)
        asked = wanted(names, best, self.rates, self.seeds)
        return [each for each in asked if (each.row, each.rate, each.seed) not in done], best

    def train(self, names: Sequence[str]) -> None:
        """Train until everything that was asked for has ended, here or in another process, or failed."""
        while todo := self._todo(names):
            for training in todo:
                with Claim(self.folder / f"{training.arm}.lock") as claimed:
                    if claimed:
                        now = self._todo(names)  # another process may have ended some of them meanwhile
                        if training in now:
                            self._run(training.together(now))
                        break
            else:
                time.sleep(POLL_SECONDS)

    def _todo(self, names: Sequence[str]) -> list[Training]:
        return [each for each in self.left(names)[0] if each.name not in self.failed]

    def _run(self, trainings: Sequence[Training]) -> None:
        folder = self._run_folder(trainings)
        log = folder.with_name(f"{folder.name}.log")
        print(f"{time.strftime('%T')} {folder.name}: {log}", flush=True)
        with log.open("a") as file:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            done = subprocess.run(self.command(*trainings), stdout=file, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            last = (log.read_text(errors="replace").splitlines() or ["no word"])[-1]
            self.failed |= dict.fromkeys((each.name for each in trainings), last)
            print(f"{folder.name} failed: {last}", file=sys.stderr, flush=True)
        elif len(trainings) > 1:
            for each in trainings:
                (folder / f"seed-{each.seed}").rename(self.folder / each.name)

    def forecast(self, names: Sequence[str]) -> str:
        """Say what is to be done: tokens, passes, hours."""
        size, (todo, best) = self.size, self.left(names)
        known = {each.name for each in todo}
        later = [Training(name, "?", seed) for name in names if name not in best for seed in self.seeds[1:]]
        later += [Training(name, "?", self.seeds[0]) for name in names if ROWS[name].tuned_as and name not in best]
        hours = sum(size.seconds(ROWS[each.row]) for each in [*todo, *later]) / 3600
        return (
            f"width {size.width}: {size.num_params:,} parameters with {EXPERTS} experts, "
            f"vocabulary {size.vocabulary:,}\n"
            f"{MEGABATCHES} mega-batches of {size.tokens:,} tokens ({TOKENS_PER_PARAMETER} for each parameter), of "
            f"{size.words:,} words of text; {size.passes} passes: {size.updates:,} updates of {BATCH * SAMPLE:,} "
            f"tokens, {size.passes * size.tokens:,} tokens in all\n{len(names)} rows, "
            f"rates {' '.join(self.rates)}, seeds {' '.join(map(str, self.seeds))}: "
            f"{len(known) + len(later)} runs left, about {hours:.1f} hours of a core"
        )


class Claim:
    """Holds a lock file while a run is made; ``with`` gives whether it could be had."""

    def __init__(self, path: Path, wait: bool = False) -> None:
        self.path, self.how = path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        self.file: Optional[IO[str]] = None

    def __enter__(self) -> bool:
        self.file = self.path.open("a")
        try:
            fcntl.flock(self.file, self.how)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        assert self.file is not None
        self.file.close()


class Part(NamedTuple):
    """So many words of a source of text, all of one mega-batch where it has a number."""

    source: Iterator[str]
    words: int
    megabatch: Optional[int] = None


def _parts(size: Size, paths: Sequence[Path]) -> list[Part]:
    """Return what the text of a size is made of."""
    if size.corpus == WIKIPEDIA:
        return [Part(_paragraphs(paths), size.words)]
    if size.corpus == PYTHON:
        return [Part(_definitions(), size.words)]
    prose, code, words = _paragraphs(paths), _definitions(), size.words // MEGABATCHES
    of_code = [words * number // (MEGABATCHES - 1) for number in range(MEGABATCHES)]
    return [
        part
        for number, share in enumerate(of_code)
        for part in (Part(prose, words - share, number), Part(code, share, number))
    ]


def _write_words(paths: Sequence[Path], size: Size, out: Path) -> None:
    """Write the first documents of texts, as many as the size needs. Raises AlmaError if there are fewer words."""
    total = 0
    with open_atomically(out, "w") as file:
        for part in _parts(size, paths):
            found = 0
            while found < part.words:
                if (text := next(part.source, None)) is None:
                    given = " ".join(map(str, ["--corpus", size.corpus, *(["--text", *paths] if paths else [])]))
                    raise AlmaError(
                        f"{given}: {total + found:,} words, --width {size.width} needs {size.words:,}; give more text, "
                        "or a smaller width"
                    )
                found += len(text.split())
                document = {"text": text, "megabatch": part.megabatch}
                file.write(text if size.corpus == WIKIPEDIA else json.dumps(document) + "\n")
            total += found


def _paragraphs(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        if not path.is_file():
            raise AlmaError(
                f"--text: no file {path}; give files of text, or .xz, a paragraph a line; TEXT does as well"
            )
        opened: Callable[..., IO[str]] = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            yield from (line for line in file if line.strip())


def _definitions() -> Iterator[str]:
    """Yield the source of each function and class of Python's standard library, those inside of others with them.

    Modules come in an order drawn at random, always the same; tests and what was installed beside are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    own = (path.relative_to(root) for path in root.rglob("*.py"))
    modules = sorted(path for path in own if not {"test", "tests", "site-packages", "idle_test"} & set(path.parts))
    random.Random(0).shuffle(modules)
    for module in modules:
        source = (root / module).read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for statement in ast.parse(source).body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield "".join(lines[statement.lineno - 1 : statement.end_lineno])


def rows_of(names: Sequence[str]) -> list[str]:
    """Return the rows that names of rows and of sets stand for. Raises AlmaError for one that is neither."""
    found: list[str] = []
    for name in names:
        if name not in ROWS and name not in SETS:
            raise AlmaError(f"--rows {name}: no such row; choose from {', '.join([*SETS, *ROWS])}")
        found += SETS.get(name, (name,))
    return list(dict.fromkeys(found))


def require_rates(rates: Sequence[str], names: Sequence[str]) -> None:
    """Raise AlmaError if an oracle would not be tuned: it has to be the best that retraining comes to."""
    oracles = [name for name in names if name.startswith(RETRAINED)]
    if len(set(rates)) == 1 and oracles:
        raise AlmaError(
            f"--rates {rates[0]}: one rate, and {oracles[0]} is what others are measured against, which must be tuned; "
            "give two rates or more (the ladder's claims rest on four), or leave out the rows with -iid"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--width", type=int, required=True, choices=sorted(TOKENS_PER_WORD[WIKIPEDIA]), help="of models"
    )
    options.add_argument(
        "--corpus",
        default=WIKIPEDIA,
        choices=sorted(TOKENS_PER_WORD),
        help="wikipedia: paragraphs of --text (default); python: functions and classes in the source code of Python's "
        "library; shift: both, in the first mega-batch text alone, in the last one code alone",
    )
    options.add_argument(
        "--text", nargs="+", type=Path, help="files of text or .xz, a paragraph a line (default: TEXT)"
    )
    options.add_argument(
        "--passes", type=InRange(whole()), default=PASSES, metavar="N", help=f"over each mega-batch (default: {PASSES})"
    )
    options.add_argument("--runs", type=Path, help="everything is written under RUNS/WIDTH (default: runs/lm-ladder)")
    options.add_argument(
        "--rows", nargs="+", default=["main"], metavar="ROW", help=f"rows, or {', '.join(SETS)} (default: main)"
    )
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    options.add_argument("--rates", nargs="+", type=_rate, help="peak learning rates (default: four, by the width)")
    options.add_argument("--dry-run", action="store_true", help="say what is left to train, with its commands, and end")
    return options


def _rate(text: str) -> str:
    if not 0 < float(text) < 1:
        raise ValueError
    return f"{float(text):g}"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program."""
    args = parser().parse_args(argv)
    size, names = Size(args.width, args.corpus, args.passes), rows_of(args.rows)
    if args.width not in TOKENS_PER_WORD[args.corpus]:
        known = ", ".join(map(str, TOKENS_PER_WORD[args.corpus]))
        raise AlmaError(f"--corpus {args.corpus} --width {args.width}: tokens for a word are known for {known}")
    rates = args.rates or size.rates
    require_rates(rates, names)
    runs = args.runs or Path(os.environ.get("RUNS") or "runs/lm-ladder")
    study = Study(size, runs / size.name, rates, args.seeds)
    if not args.dry_run:
        text = args.text or [Path(each) for each in os.environ.get("TEXT", "").split()]
        if args.corpus != PYTHON and not text and not (study.stream / "stream.json").is_file():
            raise AlmaError("--text: not given, nor is TEXT; give files of text, or .xz, a paragraph a line")
        study.prepare(text)
    print(study.forecast(names), flush=True)
    if args.dry_run:
        for training in study.left(names)[0]:
            print(shlex.join(study.command(training)))
        return 0
    study.train(names)
    print(json.dumps(study.best_rates(study.ended())))
    return 1 if study.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
