"""Three small runs of two stages with several checkpoints, which together write all types of files."""

import random
from pathlib import Path

import numpy as np

from data_prep.images import main as prepare_images
from data_prep.text.command import main as prepare_text

WORDS = [
    "--arch", "alma_transformer_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "8",
    "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--criterion", "alma_switch_cross_entropy",
    "--cpu", "--optimizer", "adam", "--lr", "0.01", "--max-update", "7", "--batch-size", "8",
    "--tokens-per-sample", "32", "--num-workers", "0",
]  # fmt: skip
GROWTH = ["--learner", "gmoe", "--grow-schedule", "2,3", "--grow-method", "copy"]
RUNS = {
    "text-gmoe": ([*GROWTH, "--carry-optimizer", "--ema-half-life", "1/8", "--save-every", "4"], WORDS),
    "text-ens": (["--learner", "ens", "--num-members", "2", "--save-every", "4", "--wait", "2"], WORDS),
    "images-gmoe": (["--learner", "gmoe"], ["--width", "4", "--max-epoch", "3", "--batch-size", "16", "--cpu"]),
}


def arguments_of(name: str, stream: Path, run: Path) -> list[str]:
    options, words = RUNS[name]
    return ["--stream", str(stream), "--run", str(run), *options, "--", *words]


def make_stream(kind: str, root: Path) -> Path:
    """Create the stream for a kind of data unless it exists."""
    stream = root / f"{kind}-stream"
    if stream.exists():
        return stream
    if kind == "images":
        write_images(root)
        data = ["arrays", "--images", str(root / "images.npy"), "--labels", str(root / "labels.npy")]
        prepare_images([*data, "--out", str(stream), "--megabatches", "2", "--test-fraction", "0.25"])
    else:
        write_text(root / "text.txt")
        sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--holdout-bytes", "200"]
        prepare_text([str(root / "text.txt"), "--out", str(stream), "--megabatches", "2", *sizes, "--workers", "1"])
    return stream


def write_text(path: Path, num_words: int = 20) -> None:
    """Write documents in which the next word is one of three, so that a model can learn."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    documents = []
    for _ in range(60):
        at, document = draw.randrange(60), []
        for _ in range(num_words):
            at = (at * 7 + draw.randrange(3)) % 60
            document.append(words[at])
        documents.append(" ".join(document))
    path.write_text("\n\n".join(documents))


def write_images(root: Path) -> None:
    """Write images in which each class is a bright quarter with noise."""
    draw = np.random.default_rng(0)
    labels = draw.integers(4, size=320)
    images = draw.integers(0, 4, size=(320, 16, 16), dtype=np.uint8) * 40
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 20
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", labels.astype(np.int64))
