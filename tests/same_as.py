"""Compares this checkout with another commit of it, on this machine, in the same minutes.

    python -m tests.same_as COMMIT [--only help dry-run messages streams runs reports] [--keep FOLDER]

Trained digits are those of one processor, so none are stored: both versions run here and what they print and write is
compared, byte by byte but for paths, times and process numbers. Differences are printed as a diff, the status is 1.
What differs on purpose stands in the changelog. Uses nothing of the package but its commands.
"""

import argparse
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

CHECKOUT = Path(__file__).resolve().parents[1]
START = "import sys; from fairseq_alma.cli import start; sys.argv[0] = {name!r}; sys.exit(start.{function}())"
STOCK = "import sys; from fairseq_cli import {module}; sys.argv[0] = {name!r}; {module}.cli_main()"
COMMANDS = {
    "alma-prep-text": "prep_text",
    "alma-prep-images": "prep_images",
    "alma-grow": "grow",
    "alma-ensemble": "ensemble",
    "alma-stream": "stream",
    "alma-report": "report",
    "alma-export": "export",
}
STOCK_COMMANDS = {"fairseq-train": "train", "fairseq-eval-lm": "eval_lm"}
SIZES = "--decoder-layers 2 --decoder-embed-dim 8 --decoder-attention-heads 2 --decoder-ffn-embed-dim 16"
MODEL = f"--arch alma_switch_lm_tiny {SIZES} --criterion alma_switch_cross_entropy --cpu --num-workers 0"
LEARN = f"{MODEL} --optimizer adam --lr 0.01 --batch-size 8 --tokens-per-sample 32"
TEXT = f"{LEARN} --max-update 13"
EPOCHS = f"{LEARN} --max-epoch 2"
MLP = "--width 4 --max-epoch 3 --batch-size 16 --cpu"
VGG = "--channels 3 --max-epoch 2 --batch-size 16 --cpu"
S = "--stream S --run R --megabatches 4"
I = "--stream I --run R"  # noqa: E741
GMOE = "--learner gmoe --grow-schedule 2,3,4,6"
FOUR = f"--learner sm -- {TEXT} --num-experts 4"

STREAMS = {  # of text and of images, two mega-batches each
    "S": "alma-prep-text text.txt --out S --megabatches 4 --vocab-size 256 --valid-bytes 600 --test-bytes 600 "
    "--holdout-bytes 240 --workers 1",
    "J": "alma-prep-text lines.jsonl --field text --out J --megabatches 2 --vocab-size 256 --workers 2",
    "X": "alma-prep-text text.txt.xz --out X --megabatches 3 --vocab-size 256 --seed 3 --workers 1",
    "I": "alma-prep-images arrays --images images.npy --labels labels.npy --out I --megabatches 2 --test-fraction 0.25",
    "D": "alma-prep-images digits --out D --megabatches 5",
}
DRY_RUNS = [
    f"{S} {FOUR}",
    f"{S} --wait 2 {FOUR}",
    f"{S} --wait 3 --drop-rest {FOUR}",
    f"{S} --replay {FOUR}",
    f"{S} --init scratch --replay {FOUR}",
    f"{S} --iid 3 {FOUR}",
    f"{S} --stage 2 {FOUR}",
    f"{S} --seed 7 --save-every 5 --keep-checkpoints --validate {FOUR}",
    f"{S} --matrix {FOUR}",
    f"{S} --num-procs 2 --learner sm -- {TEXT} --update-freq 2",
    f"{S} --carry-optimizer --ema-half-life 1/16 {FOUR}",
    f"{S} --carry-optimizer --branch-decay 0.2 {FOUR}",
    f"{S} --branch-decay 0.2 --branch-continue --branch-shape linear {FOUR}",
    f"{S} --best-checkpoint {FOUR}",
    f"{S} --replay-share 0.3 --replay-order least-seen {FOUR}",
    f"{S} --rewarm one-schedule --learner sm -- {TEXT} --lr-scheduler polynomial_decay --total-num-update 13 "
    "--warmup-updates 3",
    f"{S} --learner ens --num-members 3 -- {TEXT}",
    f"{S} --learner ens --num-members 2 --jobs 2 -- {TEXT}",
    f"{S} --learner ens --num-members 2 --member 1 --stage 1 -- {TEXT}",
    f"{S} --learner gens -- {TEXT}",
    f"{S} --learner gens --init previous -- {TEXT}",
    f"{S} {GMOE} -- {TEXT}",
    f"{S} {GMOE} --grow-method split --carry-optimizer --ema-half-life 1/8 -- {TEXT}",
    f"{S} {GMOE} --grow-method split --grow-select random -- {TEXT}",
    f"{S} {GMOE} --grow-noise 0.01 -- {TEXT}",
    f"{S} --then-evaluate 'echo {{}}' {FOUR}",
    f"{S} --learner sm -- {TEXT} --autocast bf16 --lr-scheduler inverse_sqrt --warmup-updates 4 --max-tokens 512",
    f"{S} --learner sm -- {TEXT} --tensorboard-logdir T",
    f"{I} --learner sm",
    f"{I} --learner sm --seed 1 2 3 -- --width 8",
    f"{I} --learner ens --num-members 3 --wait 2",
    f"{I} --learner bagging --num-members 3 --jobs 2",
    f"{I} --learner gens --preset released-code",
    f"{I} --learner umix --num-members 2 -- --arch alma_vgg --channels 3",
    f"{I} --learner gmoe --grow-every 1 -- --gate hard",
    f"{I} --learner moe -- --num-experts 3",
    f"{I} --learner firefly -- --channels 4",
    f"{I} --stage-average mean --shrink-perturb 0.5",
]
MESSAGES = [
    "alma-stream",
    "alma-stream --stream S",
    "alma-stream --stream nowhere --run R -- --arch alma_switch_lm_tiny --max-update 3",
    f"alma-stream {S} --learner nobody -- {TEXT}",
    f"alma-stream {S} --learner firefly -- {TEXT}",
    f"alma-stream {S} --wait 0 {FOUR}",
    f"alma-stream {S} --wait x {FOUR}",
    f"alma-stream {S} --seed -1 {FOUR}",
    f"alma-stream {S} --seed 1 1 {FOUR}",
    f"alma-stream {S} --seed 1 2 {FOUR}",
    f"alma-stream {S} --save-every 0 {FOUR}",
    f"alma-stream {S} --replay-share 1.5 {FOUR}",
    f"alma-stream {S} --replay-share nan {FOUR}",
    f"alma-stream {S} --replay-order uniform {FOUR}",
    f"alma-stream {S} --branch-decay 0 {FOUR}",
    f"alma-stream {S} --branch-shape sqrt {FOUR}",
    f"alma-stream {S} --branch-decay 0.2 --ema-half-life 1/8 {FOUR}",
    f"alma-stream {S} --ema-half-life 1/3 {FOUR}",
    f"alma-stream {S} --carry-optimizer --init scratch {FOUR}",
    f"alma-stream {S} --carry-optimizer --learner sm -- {EPOCHS}",
    f"alma-stream {S} --carry-optimizer --learner sm -- {TEXT} --lr-scheduler polynomial_decay --total-num-update 13",
    f"alma-stream {S} --stage-average mean {FOUR}",
    f"alma-stream {S} --num-members 3 {FOUR}",
    f"alma-stream {S} --learner ens --num-members 0 -- {TEXT}",
    f"alma-stream {S} --learner ens --member 5 -- {TEXT}",
    f"alma-stream {S} --learner gmoe -- {TEXT}",
    f"alma-stream {S} --learner gmoe --grow-schedule 4,2 -- {TEXT}",
    f"alma-stream {S} --learner gmoe --grow-schedule 2,9,9,9 -- {TEXT}",
    f"alma-stream {S} --learner gmoe --grow-schedule 2,3 -- {TEXT}",
    f"alma-stream {S} {GMOE} --grow-noise -1 -- {TEXT}",
    f"alma-stream {S} {GMOE} -- {TEXT} --num-experts 4",
    f"alma-stream {S} {GMOE} --init scratch -- {TEXT}",
    f"alma-stream {S} --stage 9 {FOUR}",
    f"alma-stream {S} --num-procs 2 {FOUR}",
    f"alma-stream {S} --jobs 2 {FOUR}",
    f"alma-stream {S} -- --max-update x",
    f"alma-stream {S} -- --arch alma_switch_lm_tiny",
    f"alma-stream {S} -- --arch alma_switch_lm_tiny --max-update 0",
    f"alma-stream {S} -- {TEXT} --save-dir x",
    f"alma-stream {S} -- {TEXT} --finetune x",
    f"alma-stream {S} -- {TEXT} --lr -1",
    f"alma-stream {S} -- {TEXT} --dropout 1.5",
    f"alma-stream {S} -- {TEXT} --adam-betas 1,2",
    f"alma-stream {S} -- {TEXT} --decoder-layers 0",
    f"alma-stream {S} -- {TEXT} --capacity-factor -2",
    f"alma-stream {S} -- --arch alma_switch_lm_tiny --max-update 3 --balance-loss-weight 0.1",
    f"alma-stream {S} -- {TEXT} --batch-size many",
    f"alma-stream {I} --save-every 5",
    f"alma-stream {I} --carry-optimizer",
    f"alma-stream {I} --stage-average third",
    f"alma-stream {I} --shrink-perturb 1",
    f"alma-stream {I} --learner umix --stage-average mean --init scratch",
    f"alma-stream {I} -- --width 0",
    f"alma-stream {I} -- --lr 0",
    f"alma-stream {I} -- --select nothing",
    f"alma-stream {I} -- --least-gain x",
    f"alma-stream {I} -- --max-update 5",
    f"alma-stream {I} -- --arch alma_switch_lm",
    f"alma-stream {I} --learner gmoe -- --arch alma_mlp",
    f"alma-stream {I} --learner moe -- --num-experts 0",
    f"alma-stream {I} -- --optimizer lion",
    f"alma-stream {I} -- --optimizer adam",
    f"alma-stream {I} --preset nothing",
    "alma-stream --stream text.txt --run R",
    "alma-prep-text nothing.txt --out new --megabatches 2 --vocab-size 256",
    "alma-prep-text text.txt --out new --megabatches 0 --vocab-size 256",
    "alma-prep-text text.txt --out new --megabatches 2 --vocab-size 3",
    "alma-prep-text text.txt --out new --megabatches 90000 --vocab-size 256",
    "alma-prep-text text.txt --out S --megabatches 2 --vocab-size 256",
    "alma-prep-text text.txt --out new --megabatches 2 --vocab-size 256 --field text",
    "alma-prep-text lines.jsonl --out new --megabatches 2 --vocab-size 256 --field nothing",
    "alma-prep-text text.txt --out S --append --vocab-size 300",
    "alma-prep-images mnist --source . --out new --megabatches 2",
    "alma-prep-images arrays --images images.npy --out new --megabatches 2",
    "alma-prep-images arrays --images labels.npy --labels labels.npy --out new --megabatches 2",
    "alma-prep-images digits --out new --megabatches 100000",
    "alma-report nowhere",
    "alma-report S",
    "alma-grow --path text.txt --out g.pt --method copy --experts 1 --select random",
    "alma-grow --path nothing.pt --out g.pt --method copy --experts 1 --select random",
    "alma-grow --path text.txt --out g.pt --method copy --experts 0 --select random",
    "alma-ensemble nothing.pt --out e.pt",
    "alma-ensemble text.txt text.txt --out e.pt",
    "alma-export nothing.pt --out e",
    "alma-export text.txt --out e",
]
STOCK_MESSAGES = [
    f"fairseq-train S --user-dir fairseq_alma --task alma_lm {TEXT}",
    f"fairseq-train S --user-dir fairseq_alma --task alma_lm --megabatch 9 {TEXT}",
    f"fairseq-train I --user-dir fairseq_alma --task alma_lm --megabatch 0 {TEXT}",
    f"fairseq-train S --user-dir fairseq_alma --task alma_lm --megabatch 0 {TEXT} --decoder-layers 2000",
    f"fairseq-train S --user-dir fairseq_alma --task alma_lm --megabatch 0 {TEXT} --moe-freq 0",
    f"fairseq-train S --user-dir fairseq_alma --task alma_lm --megabatch 0 {TEXT} --fp16",
    "fairseq-eval-lm S --user-dir fairseq_alma --task alma_lm --path text.txt --gen-subset test --cpu",
]
RUNS = {
    "text-sm": f"--stream S --learner sm --save-every 5 -- {EPOCHS} --num-experts 2",
    "text-gmoe": f"--stream S {GMOE} --grow-method split --carry-optimizer --ema-half-life 1/8 -- {TEXT}",
    "text-ens": f"--stream J --learner ens --num-members 2 -- {TEXT}",
    "text-branch": f"--stream J --branch-decay 0.3 --replay-share 0.3 -- {TEXT}",
    "images-seeds": f"--stream I --learner sm --seed 1 2 -- {MLP}",
    "images-gens": f"--stream I --learner gens -- {MLP}",
    "images-gmoe": f"--stream I --learner gmoe -- {MLP}",
    "images-firefly": f"--stream I --learner firefly -- {VGG}",
}
REPORTS = {"text": ["text-sm", "text-gmoe"], "images": ["images-seeds/seed-1", "images-gens", "images-gmoe"]}

TIMES = re.compile(
    r'"wall_seconds": [0-9.]+|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|\b\d+:\d\d:\d\d\b|[0-9.,]+ words/s|[0-9.]+ s\b'
    r"|\b(?:wps|ups|wall|train_wall|took|training in) [0-9.]+"
)


class Version:
    """One version of the package, with a folder of its own to work in.

    Args:
        name: of it, for messages.
        checkout: its files.
        folder: to work in.
    """

    def __init__(self, name: str, checkout: Path, folder: Path) -> None:
        self.name, self.checkout, self.folder = name, checkout, folder
        folder.mkdir()
        for package in (
            "fairseq_alma",
            "data_prep",
        ):  # where --user-dir names it, and the only place it is imported from
            (folder / package).symlink_to(checkout / package)
        write_inputs(folder)

    def run(self, line: str) -> str:
        """Run a command line to its end; return its status and what it printed, without what is of one machine."""
        name, _, rest = line.partition(" ")
        code = START.format(name=name, function=COMMANDS[name]) if name in COMMANDS else None
        if code is None:
            code = STOCK.format(name=name, module=STOCK_COMMANDS[name])
        words = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {rest}"] if rest else ["true"], capture_output=True, text=True, check=True
        ).stdout.split("\0")[:-1]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(self.folder),
        }
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return self.plain(f"status {ended.returncode}\n{ended.stdout}{ended.stderr}")

    def plain(self, text: str) -> str:
        """Return a text without paths, times, and where in the code a line of a log is from."""
        for path, shown in ((self.folder, "HERE"), (Path(sys.prefix), "PREFIX"), (self.checkout, "CHECKOUT")):
            text = text.replace(str(path), shown)
        return TIMES.sub("TIME", text)


def write_inputs(folder: Path) -> None:
    """Write a text, plain, compressed and as JSON lines, and images with labels."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    documents = [" ".join(words[(k * 7 + draw.randrange(3)) % 60] for k in range(40)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents[::-1]))
    subprocess.run(["xz", "-k", "text.txt"], cwd=folder, check=True)
    code = (
        "import numpy as np; d = np.random.default_rng(0); labels = d.integers(0, 3, 240); "
        "images = d.integers(0, 90, (240, 16, 16)) + 50 * labels[:, None, None]; "
        "np.save('images.npy', images.astype('uint8')); np.save('labels.npy', labels)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def compare_lines(
    versions: Sequence[Version], lines: Sequence[str], jobs: int, must_succeed: bool = True
) -> Iterator[str]:
    """Yield what differs between what each version prints for each command line, and what fails and must not."""
    with ThreadPoolExecutor(jobs) as pool:
        printed = [list(pool.map(version.run, lines)) for version in versions]
    for line, before, now in zip(lines, *printed, strict=True):
        yield from difference(line, before, now)
        if must_succeed and not now.startswith("status 0"):
            yield f"== {line}\n{now}"


def difference(what: str, before: str, now: str) -> Iterator[str]:
    """Yield one text if two differ."""
    if before != now:
        shown = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=1)
        yield "\n".join([f"== {what}", *list(shown)[2:]])


def contents(version: Version, root: str) -> dict[str, str]:
    """Return every file below a folder as a text that tells whether it is the same: records whole, others as sha256."""
    found = {}
    for path in sorted((version.folder / root).rglob("*")):
        name = str(path.relative_to(version.folder))
        if path.suffix == ".pt":
            found[name] = "a checkpoint"  # the weights are compared by what stage.json says of them
        elif path.name == "run.json":
            found[name] = version.plain(_without(json.loads(path.read_text()), ("versions", "path")))
        elif path.name.startswith(".lock"):
            found[name] = "a lock"
        elif path.suffix in (".json", ".md", ".csv", ".tex", ".html"):
            found[name] = version.plain(path.read_text())
        elif path.is_file() and path.suffix not in (".log", ".png", ".pdf"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_file():
            found[name] = "there"
    return found


def _without(record: Any, names: Sequence[str]) -> str:
    if isinstance(record, dict):
        record = {key: json.loads(_without(each, names)) for key, each in record.items() if key not in names}
    return json.dumps(record, indent=1, sort_keys=True)


def compare_folders(versions: Sequence[Version], roots: Sequence[str]) -> Iterator[str]:
    """Yield what differs between the files below folders of both versions."""
    for root in roots:
        before, now = (contents(version, root) for version in versions)
        for name in sorted({*before, *now}):
            yield from difference(name, before.get(name, "not there"), now.get(name, "not there"))


def compare_help(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare what each command says of itself."""
    lines = [f"{name} --help" for name in COMMANDS]
    user = "--user-dir fairseq_alma --task alma_lm"
    lines += [f"fairseq-train S {user} --arch alma_switch_lm_tiny --criterion alma_switch_cross_entropy --help"]
    lines += [f"fairseq-train I {user.replace('alma_lm', 'alma_image_classification')} --arch alma_moe_vgg --help"]
    lines += [f"fairseq-eval-lm S {user} --help"]
    return compare_lines(versions, lines, jobs)


def compare_messages(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare the answers to what is wrong."""
    return compare_lines(versions, [*MESSAGES, *STOCK_MESSAGES], jobs, must_succeed=False)


def compare_streams(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare the bytes of streams."""
    yield from compare_lines(versions, list(STREAMS.values()), jobs)
    yield from compare_folders(versions, list(STREAMS))


def compare_dry_runs(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare the commands that each stage of a run would be."""
    return compare_lines(versions, [f"alma-stream --dry-run {words}" for words in DRY_RUNS], jobs)


def compare_runs(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare the records of small runs: every figure to its last digit."""
    with ThreadPoolExecutor(jobs) as pool:
        lines = [f"alma-stream --run {name} {words}" for name, words in RUNS.items()]
        ended = pool.map(lambda job: job[0].run(job[1]), [(each, line) for line in lines for each in versions])
        yield from (f"== {text}" for text in ended if not text.startswith("status 0"))
    yield from compare_folders(versions, list(RUNS))


def compare_reports(versions: Sequence[Version], jobs: int) -> Iterator[str]:
    """Compare the tables and pages that are made of these runs."""
    lines = [f"alma-report {' '.join(runs)} --out report-{name}" for name, runs in REPORTS.items()]
    yield from compare_lines(versions, lines, jobs)
    yield from compare_folders(versions, [f"report-{name}" for name in REPORTS])


COMPARE: Mapping[str, Callable[[Sequence[Version], int], Iterator[str]]] = {
    "streams": compare_streams,
    "help": compare_help,
    "messages": compare_messages,
    "dry-run": compare_dry_runs,
    "runs": compare_runs,
    "reports": compare_reports,
}
NEEDS = {"messages": ["streams"], "dry-run": ["streams"], "runs": ["streams"], "reports": ["streams", "runs"]}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of this repository")
    parser.add_argument(
        "--only", nargs="+", choices=list(COMPARE), default=list(COMPARE), help="compare these (default: all)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="commands at the same time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    arguments = parser.parse_args(argv)
    root = arguments.keep or Path(tempfile.mkdtemp(prefix="same-as-"))
    root.mkdir(exist_ok=True)
    try:
        return compare(arguments, root.resolve())
    finally:
        if arguments.keep is None:
            shutil.rmtree(root)


def compare(arguments: argparse.Namespace, root: Path) -> int:
    """Compare the parts that are asked for; return the exit status."""
    other = root / "checkout"
    subprocess.run(["git", "clone", "-q", "--shared", str(CHECKOUT), str(other)], check=True)
    subprocess.run(["git", "checkout", "-q", arguments.commit], cwd=other, check=True)
    versions = [Version("before", other, root / "old"), Version("now", CHECKOUT, root / "new")]
    num_different = 0
    needed = {*arguments.only, *(each for part in arguments.only for each in NEEDS.get(part, []))}
    for part in sorted(needed, key=list(COMPARE).index):
        found = list(COMPARE[part](versions, arguments.jobs))
        if part in arguments.only:
            print(*found, f"{part}: {len(found)} differ", sep="\n", flush=True)
            num_different += len(found)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
