"""Streams of both kinds of tokenizer, and untrained models of every kind that know them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.text.command import main as prep_text
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.cli.export import main as export
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from tests.models.ensembles import save_ensemble, save_member, switch_config

TEXT = "the cat sat on a mat while naïve dogs <barked> at 42 moons – 北京 🙂 </s> and <unk> was never known"
WORDS = TEXT.split()
LONGEST = 24
KINDS = ("dense", "switch", "tree", "sinusoidal", "ensemble")
PAD, EOS = 1, 2
TREES = "[[0,1,[2,3]],[[0,3],[1,[2]]]]"


def write_stream(folder: Path, tokenizer: str) -> Path:
    """Prepare a stream of a few hundred small documents; return its folder."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(WORDS), (600, 11), generator=generator).tolist()
    documents = [" ".join(WORDS[pick] for pick in row[: 3 + row[0] % 8]) for row in picks]
    (folder / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    words = [f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2", "--vocab-size", "340"]
    words += ["--valid-bytes", "1800", "--test-bytes", "1800", "--workers", "1", "--tokenizer-type", tokenizer]
    assert prep_text(words) in (0, None)
    return folder / "S"


def save(path: Path, config, seed: int, stream: Path) -> Path:
    """Write the checkpoint of a model that knows a stream's tokens, its weights large enough to disagree about them."""
    vocab_size = StreamTokenizer.open(stream).vocab_size
    save_member(path, config, seed, Stream.open(stream).dictionary_sha256, vocab_size)
    checkpoint = read_checkpoint(path, mmap=False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in checkpoint["model"].items():
        if "output_projection" not in name:  # the same tensor as the embeddings
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    checkpoint["cfg"]["task"] = {"_name": "alma_lm", "data": str(stream)}
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {"best": None}, "num_updates": 0}
    checkpoint["optimizer_history"] = [history]  # without these fairseq takes it for a checkpoint of long ago
    checkpoint["extra_state"] = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
    write_checkpoint(checkpoint, path)
    return path


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> Path:
    """A stream with byte-level BPE."""
    return write_stream(tmp_path_factory.mktemp("stream"), "byte-level-bpe")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, stream) -> dict[str, Path]:
    """A checkpoint of every kind of language model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = {
        "dense": switch_config(moe_freq=0, activation_fn="gelu"),
        "switch": switch_config(),
        "tree": switch_config(gate_trees=TREES, activation_fn="gelu_accurate"),
        "sinusoidal": switch_config(decoder_sinusoidal_pos=True),
    }
    paths = {
        kind: save(folder / kind / "a.pt", config, seed, stream) for seed, (kind, config) in enumerate(kinds.items())
    }
    inner = save_ensemble(folder / "inner.pt", [paths["switch"], paths["sinusoidal"]], [1.0, 2.0])
    paths["ensemble"] = save_ensemble(folder / "E.pt", [inner, paths["tree"]])
    return paths


@pytest.fixture(scope="session")
def sentencepiece_stream(tmp_path_factory) -> Path:
    """A stream with sentencepiece."""
    return write_stream(tmp_path_factory.mktemp("stream"), "sentencepiece")


@pytest.fixture(scope="session")
def folders(checkpoints, tmp_path_factory) -> dict[str, Path]:
    """An exported folder of every kind."""
    root = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        assert export([str(checkpoints[kind]), "--out", str(root / kind)]) == 0
    return {kind: root / kind for kind in KINDS}


def exported(folder):
    """Load a folder as anybody does who has its code run."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.fixture(scope="session")
def test_ids(stream):
    """Rows of the test set as fairseq cuts it, the last one padded."""
    opened = Stream.open(stream)
    ids = torch.from_numpy(TokenFile(opened.prefix(opened.split("test"))).ids[:200].astype("int64"))
    rows = torch.cat([torch.tensor([EOS]), ids]).split(LONGEST)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
