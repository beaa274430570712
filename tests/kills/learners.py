"""One small run of each learner, on text and on images: two stages, of several checkpoints and epochs each."""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.images.command import main as prepare_images
from data_prep.text.command import main as prepare_text
from fairseq_alma.cli.stream import main as alma_stream

TEXT = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim",
    "16", "--decoder-attention-heads", "2", "--criterion", "alma_switch_cross_entropy", "--cpu", "--optimizer", "adam",
    "--lr", "0.01", "--max-epoch", "2", "--batch-size", "8", "--tokens-per-sample", "32", "--num-workers", "0",
]  # fmt: skip
UPDATES = ["--max-update" if word == "--max-epoch" else word for word in TEXT]
UPDATES[UPDATES.index("--max-update") + 1] = "13"
EXPERTS = ["--num-experts", "2"]
MLP = ["--width", "4", "--max-epoch", "3", "--batch-size", "16", "--cpu"]
VGG = ["--channels", "3", "--max-epoch", "2", "--batch-size", "16", "--cpu"]
UPDATES_ALONE = [*UPDATES[:2], *UPDATES[4:]]  # without --decoder-layers
GROWTH = ["--learner", "gmoe", "--grow-schedule", "2,3", "--grow-method"]
REPLAY = ["--replay-share", "0.3"]
PAIR = ["--num-members", "2", "--learner"]
COMMANDS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "images": {
        "sm": (["--learner", "sm"], MLP),
        "moe": (["--learner", "moe"], MLP),
        "ens": ([*PAIR, "ens"], MLP),
        "bagging": ([*PAIR, "bagging"], MLP),
        "umix": ([*PAIR, "umix"], MLP),
        "gens": (["--learner", "gens"], MLP),
        "gmoe": (["--learner", "gmoe"], MLP),
        "firefly": (["--learner", "firefly"], VGG),
        "firefly-deeper": (["--learner", "firefly", "--grow-in", "depth"], VGG),
        "seeds": (["--learner", "sm", "--seed", "1", "2"], MLP),
        "jobs": ([*PAIR, "ens", "--jobs", "2"], MLP),
        "alone": ([*PAIR, "ens", "--jobs", "1"], MLP),
        "moving": (["--ema-half-life", "1/8", "--seed", "1", "2"], MLP),
        "copy": ([*PAIR, "ens", "--branch-share", "0.5"], MLP),
    },
    "text": {
        "sm": (["--learner", "sm"], [*TEXT, *EXPERTS]),
        "ens": ([*PAIR, "ens"], [*TEXT, *EXPERTS]),
        "gens": (["--learner", "gens"], [*TEXT, *EXPERTS]),
        "gmoe-copy": ([*GROWTH, "copy"], TEXT),
        "gmoe-split": ([*GROWTH, "split"], TEXT),
        "carried": ([*GROWTH, "split", "--carry-optimizer", "--ema-half-life", "1/8"], UPDATES),
        "grow": (
            ["--learner", "grow", "--grow-schedule", "layers=1,2 experts=2,3", "--carry-optimizer"],
            UPDATES_ALONE,
        ),
        "branch": (["--carry-optimizer", "--branch-share", "0.4", *REPLAY], [*UPDATES, *EXPERTS]),
        "best": (["--best-checkpoint"], [*TEXT, *EXPERTS]),
        "jobs": ([*PAIR, "ens", "--jobs", "2"], [*TEXT, *EXPERTS]),
        "seeds": (
            ["--seed", "1", "2", "--carry-optimizer", "--ema-half-life", "1/8"],
            [*UPDATES, *EXPERTS, "--dropout", "0", "--warmup-updates", "3"],
        ),
        "procs": (["--num-procs", "2"], [*TEXT, *EXPERTS, "--update-freq", "2"]),
    },
}


class Learner(NamedTuple):
    """One run of the matrix."""

    kind: str
    name: str
    is_resumed = True
    main = staticmethod(alma_stream)

    def begin(self, stream: Path, run: Path) -> None:
        """Begin with nothing."""

    def arguments(self, stream: Path, run: Path) -> list[str]:
        """Return those of ``alma-stream``."""
        options, words = COMMANDS[self.kind][self.name]
        own = [] if self.kind == "images" else ["--save-every", "4"]
        return ["--stream", str(stream), "--run", str(run), "--wait", "1", *options, *own, "--", *words]

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


LEARNERS = [Learner(kind, name) for kind, names in COMMANDS.items() for name in names]


def make_stream(kind: str, root: Path) -> Path:
    """Make the stream of a kind, unless it is there already."""
    stream = root / f"{kind}-stream"
    if kind == "images":
        write_images(root)
        data = ["arrays", "--images", str(root / "images.npy"), "--labels", str(root / "labels.npy")]
        prepare_images([*data, "--out", str(stream), "--megabatches", "2", "--test-fraction", "0.25"])
    else:
        write_text(root / "text.txt")
        sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--workers", "1"]
        prepare_text([str(root / "text.txt"), "--out", str(stream), "--megabatches", "2", *sizes])
    return stream


def write_text(path: Path, num_words: int = 20, seed: int = 0) -> None:
    """Write documents in which each word all but decides the next, so that there is something to learn."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    draw = random.Random(seed) if seed else draw  # other documents of the same words
    documents = []
    for _ in range(60):
        at, document = draw.randrange(60), []
        for _ in range(num_words):
            at = (at * 7 + draw.randrange(3)) % 60
            document.append(words[at])
        documents.append(" ".join(document))
    path.write_text("\n\n".join(documents))


def write_images(root: Path) -> None:
    """Write images in which each class is a bright quarter under noise."""
    draw = np.random.default_rng(0)
    labels = draw.integers(4, size=320)
    images = draw.integers(0, 4, size=(320, 16, 16), dtype=np.uint8) * 40
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 20
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", labels.astype(np.int64))
