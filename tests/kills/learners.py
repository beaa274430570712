"""Three small runs of two stages with several checkpoints, which together write all types of files."""

from pathlib import Path

from data_prep.text.command import main as prepare_text
from tests.images.image_streams import make_stream as make_image_stream
from tests.text.stock_commands import write_text

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
    if not stream.exists() and kind == "images":
        make_image_stream(stream, num_megabatches=2)
    elif not stream.exists():
        write_text(root / "text.txt", num_documents=30)
        sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--holdout-bytes", "200"]
        prepare_text([str(root / "text.txt"), "--out", str(stream), "--megabatches", "2", *sizes, "--workers", "1"])
    return stream
