"""Make the archives beside this file anew, with the version that is checked out.

``python -m tests.compatibility.make_archives [text] [images]``, from the root of the checkout. A run is killed when its
first checkpoint within stage 1 appears, and again if it has come to the stage's end by then. Takes about ten minutes.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.compatibility.archives import (
    COMMANDS,
    ENVIRONMENT,
    KINDS,
    archive_of,
    machine,
    stream_of,
    weight_sums,
)

CHECKOUT = Path(__file__).parents[2]
NUM_TRIES = 20
LEFT_OUT = (".log", ".lock")  # logs, and locks with the names of processes: nothing reads them again

TEXT = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim",
    "16", "--decoder-attention-heads", "2", "--criterion", "alma_switch_cross_entropy", "--cpu", "--optimizer", "adam",
    "--lr", "0.01", "--lr-scheduler", "polynomial_decay", "--total-num-update", "16", "--max-update", "16",
    "--batch-size", "4", "--tokens-per-sample", "16", "--num-workers", "0",
]  # fmt: skip
SAVE = ["--save-every", "4"]
MLP = ["--width", "4", "--max-epoch", "16", "--batch-size", "16", "--cpu"]
VGG = ["--channels", "3", "--max-epoch", "6", "--batch-size", "16", "--cpu"]
SGD = ["--optimizer", "sgd", "--lr", "0.05", "--momentum", "0.9"]
ADAM = ["--optimizer", "adam", "--lr", "0.01"]
PREPARE = {
    "text": [
        "alma-prep-text", "text.txt", "--out", stream_of("text"), "--megabatches", "3", "--vocab-size", "256",
        "--valid-words", "100", "--test-words", "100", "--workers", "1",
    ],
    "images": [
        "alma-prep-images", "arrays", "--images", "images.npy", "--labels", "labels.npy",
        "--out", stream_of("images"), "--megabatches", "4", "--test-fraction", "0.25",
    ],
}  # fmt: skip
GROWTH = ["--learner", "gmoe", "--grow-schedule", "2,3,4", "--grow-method"]
RUNS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "text": {
        "sm": (["--learner", "sm"], [*TEXT, "--num-experts", "2"]),
        "gmoe-copy": ([*GROWTH, "copy"], TEXT),
        "gmoe-split": ([*GROWTH, "split"], TEXT),
        "ens": (["--learner", "ens", "--num-members", "2", "--wait", "2"], [*TEXT, "--num-experts", "2"]),
        "umix": (["--learner", "umix", "--num-members", "2", "--wait", "2"], [*TEXT, "--num-experts", "2"]),
    },
    "images": {
        "sm": (["--learner", "sm"], MLP),
        "sm-replay": (["--learner", "sm", "--wait", "2", "--replay", "--init", "scratch"], [*MLP, *ADAM]),
        "gmoe-soft": (["--learner", "gmoe"], [*MLP, "--gate", "soft"]),
        "gmoe-hard": (["--learner", "gmoe"], [*MLP, "--gate", "hard"]),
        "gmoe-vgg": (["--learner", "gmoe", "--wait", "2"], [*VGG, "--arch", "alma_moe_vgg", *SGD]),
        "moe": (["--learner", "moe", "--wait", "2"], [*MLP, *SGD]),
        "ens": (["--learner", "ens", "--num-members", "2", "--wait", "2"], [*MLP, *ADAM]),
        "bagging": (["--learner", "bagging", "--num-members", "2", "--wait", "2", "--combine", "vote"], MLP),
        "umix": (["--learner", "umix", "--num-members", "2", "--wait", "2"], MLP),
        "gens": (["--learner", "gens"], MLP),
        "firefly": (["--learner", "firefly", "--wait", "2"], VGG),
    },
}


def main() -> None:
    kinds = sys.argv[1:] or KINDS
    made = json.loads(COMMANDS.read_text()) if COMMANDS.exists() else {"kinds": {}}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            made["kinds"][kind] = make_archive(kind, Path(folder))
    made["machine"] = machine()
    COMMANDS.write_text(json.dumps(made, indent=1) + "\n")


def make_archive(kind: str, root: Path) -> dict[str, Any]:
    """Make the archive of a kind; return its part of commands.json."""
    write_text(root) if kind == "text" else write_images(root)
    run(root, PREPARE[kind])
    runs = {name: make_run(root, kind, name) for name in RUNS[kind]}
    pack(kind, root)
    return {"prepare": PREPARE[kind], "runs": runs}


def pack(kind: str, root: Path) -> None:
    with tarfile.open(archive_of(kind), "w:xz", preset=9) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and not any(part in path.name for part in LEFT_OUT):
                archive.add(path, path.relative_to(root), filter=anonymous)


def make_run(root: Path, kind: str, name: str) -> dict[str, Any]:
    """Make a run in its three states, in the folder where its command says, then moved; return what is noted of it."""
    options, words = RUNS[kind][name]
    command = ["alma-stream", "--stream", stream_of(kind), "--run", f"runs/{name}", *options]
    command += [*(SAVE if kind == "text" else []), "--", *words]
    place = root / "runs" / name
    run(root, command)
    move(place, root / "finished" / name)
    run(root, with_option(command, "--stage", "0"))
    shutil.copytree(place, root / "begun" / name)
    for _ in range(NUM_TRIES):
        if kill_in_training(root, kind, place, command):
            break
        shutil.rmtree(place)
        shutil.copytree(root / "begun" / name, place)
    else:
        raise SystemExit(f"{kind} {name}: came to the end of stage 1 each time; train for longer")
    move(place, root / "killed" / name)
    print(kind, name, flush=True)
    return {"command": command, "weights": weight_sums(root / "finished" / name)}


def kill_in_training(root: Path, kind: str, place: Path, command: list[str]) -> bool:
    """Kill a run as soon as stage 1 has an unfinished checkpoint; tell whether it was in time."""
    program = [sys.executable, "-m", "tests.cli.saving_stream"] if kind == "images" else ["alma-stream"]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{CHECKOUT}:{ENVIRONMENT.get('PYTHONPATH', '')}"}
    # Language models are trained one after the other: of an ensemble the first one is to be trained to its end.
    member = "member-1" if kind == "text" and place.name == "ens" else "member-*"
    output = subprocess.DEVNULL
    process = subprocess.Popen([*program, *command[1:]], cwd=root, env=environment, stdout=output, stderr=output)
    deadline = time.monotonic() + 120
    while not has_saved(place, kind, member) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # until its child has died, too
    return has_saved(place, kind, member) and not (place / "stage-001/stage.json").exists()


def has_saved(place: Path, kind: str, member: str) -> bool:
    """Tell whether stage 1 has an unfinished checkpoint; fairseq writes it twice."""
    if kind == "images":
        return bool(list(place.glob(f"stage-001/{member}/training.pt")))
    copies = [*place.glob(f"stage-001/{member}/checkpoint_1_*.pt"), *place.glob(f"stage-001/{member}/*_last.pt")]
    return len(copies) == 2 and len({path.stat().st_size for path in copies if path.exists()}) == 1


def with_option(command: list[str], *option: str) -> list[str]:
    """Return a command with an option more before its ``--``."""
    end = command.index("--")
    return [*command[:end], *option, *command[end:]]


def run(root: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def move(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    source.rename(target)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_text(root: Path) -> None:
    """Write documents in which each word all but decides the next, so that there is something to learn."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    documents = []
    for _ in range(60):
        at, document = draw.randrange(60), []
        for _ in range(20):
            at = (at * 7 + draw.randrange(3)) % 60
            document.append(words[at])
        documents.append(" ".join(document))
    (root / "text.txt").write_text("\n\n".join(documents))


def write_images(root: Path) -> None:
    """Write images in which each class is a bright quarter under noise, in few grey levels: they compress well."""
    draw = np.random.default_rng(0)
    labels = draw.integers(4, size=320)
    images = draw.integers(0, 4, size=(320, 16, 16), dtype=np.uint8) * 40
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 20
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", labels.astype(np.int64))


if __name__ == "__main__":
    main()
