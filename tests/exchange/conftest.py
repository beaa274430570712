"""Streams with both kinds of tokenizer, and untrained models for them."""

from pathlib import Path

import pytest
import torch
from fairseq import models
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from data_prep.text.command import main as prep_text
from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, untrained_checkpoint, write_checkpoint
from fairseq_alma.checkpoints.model_options import DEFAULT_START
from fairseq_alma.cli.export import main as export
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from tests.data.sentencepiece_models import train_sentencepiece
from tests.models.ensembles import load, save_ensemble, switch_config, task_of

TEXT = "the cat sat on a mat while naïve dogs <barked> at 42 moons – 北京 🙂 </s> and <unk> was never known"
WORDS = TEXT.split()
LONGEST = 24
KINDS = ("dense", "mixture", "tied")
PAD, EOS = 1, 2


def write_stream(folder: Path, *options: str) -> Path:
    """Prepare a stream of a few hundred small documents; return its folder."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(WORDS), (600, 11), generator=generator).tolist()
    documents = [" ".join(WORDS[pick] for pick in row[: 3 + row[0] % 8]) for row in picks]
    (folder / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    words = [f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2"]
    assert prep_text([*words, "--valid-bytes", "1800", "--test-bytes", "1800", "--workers", "1", *options]) in (0, None)
    return folder / "S"


CONFIG = {
    "_name": "alma_transformer_lm", "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 2,
    "decoder_attention_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 500.0, "norm_eps": 1e-3,
    "no_embedding_norm": False, "share_decoder_input_output_embed": False, "symbol_ids": "", "num_experts": 1,
    "moe_freq": 2, "gate_trees": "", "eval_capacity_factor": 0.0, "balance_loss_weight": 0.01,
    "tokens_per_sample": LONGEST, "max_target_positions": None, **DEFAULT_START,
}  # fmt: skip
"""``cfg.model`` of a small alma_transformer_lm whose head dimension is not width / heads."""


def transformer_config(**options):
    return {**CONFIG, **options}


def save(path: Path, config, seed: int, stream: Path) -> Path:
    """Write the checkpoint of a random model for the tokens of a stream, with large enough weights."""
    torch.manual_seed(seed)
    task = task_of(num_tokens=StreamTokenizer.open(stream).vocab_size)
    weights = models.build_model(OmegaConf.create(config), task).state_dict()
    for name, tensor in weights.items():
        shared = name.endswith("output_projection.weight") and tensor is weights["decoder.embed_tokens.weight"]
        if not shared:
            tensor += 0.3 * torch.randn(tensor.shape)
    state = {DICTIONARY_KEY: Stream.open(stream).dictionary_sha256}
    cfg = {"_name": None, "model": config, "task": {"_name": "alma_lm", "data": str(stream)}}
    write_checkpoint(untrained_checkpoint(cfg, weights, state), path)
    return path


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> Path:
    """A stream with byte-level BPE."""
    return write_stream(tmp_path_factory.mktemp("stream"), "--vocab-size", "340")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, stream) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = {
        "dense": transformer_config(),
        "mixture": transformer_config(num_experts=4, decoder_layers=3),
        "tied": transformer_config(share_decoder_input_output_embed=True, no_embedding_norm=True),
        "split": transformer_config(num_experts=4, gate_trees="[[0,1,[2,3]]]"),
        "dropping": transformer_config(num_experts=2, eval_capacity_factor=1.0),
        "switch": switch_config(),
    }
    paths = {kind: save(folder / f"{kind}.pt", cfg, seed, stream) for seed, (kind, cfg) in enumerate(kinds.items())}
    paths["ensemble"] = save_ensemble(folder / "E.pt", [paths["dense"], paths["switch"]])
    return paths


@pytest.fixture(scope="session")
def sentencepiece_stream(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    return write_stream(folder, "--tokenizer", str(train_sentencepiece(folder / "a.model", [TEXT] * 50)))


@pytest.fixture(scope="session")
def folders(checkpoints, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        assert export([str(checkpoints[kind]), "--out", str(root / kind)]) == 0
    return {kind: root / kind for kind in KINDS}


def exported(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits_here(path, tokens, stream):
    """Return the logits of a checkpoint's model, loaded as fairseq's commands do."""
    with torch.no_grad():
        return load(path, StreamTokenizer.open(stream).vocab_size)(tokens)[0]


@pytest.fixture(scope="session")
def test_ids(stream):
    """Rows of the test set as fairseq cuts it, the last one padded."""
    ids = torch.from_numpy(TokenFile(stream / "test").ids[:200].astype("int64"))
    rows = torch.cat([torch.tensor([EOS]), ids]).split(LONGEST)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
