"""``alma-import``: a folder of transformers becomes a checkpoint that predicts the same, and goes back as it came."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.cli.export import main as export
from fairseq_alma.cli.grow import main as grow
from fairseq_alma.cli.import_model import main
from fairseq_alma.data.tokens import TokenFile
from tests import scripts
from tests.exchange.conftest import TEXT, exported, write_stream
from tests.text.stock_commands import evaluate, train_model

refused = partial(scripts.refused, main)
SIZES = {
    "vocab_size": 347, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 40, "initializer_range": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
TIED, FOUR_LAYERS = {"tie_word_embeddings": True}, {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}


def write_folder(folder, kind="qwen3", **options):
    """Write a model at random with a tokenizer of fewer tokens than it has rows; return the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    special = {"eos_token": "<|end|>", "pad_token": "<|user|>", "additional_special_tokens": ["<|user|>"]}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    sizes = {**SIZES, **ids, **(EXPERTS if kind == "qwen3_moe" else {}), **options}
    config = transformers.Qwen3MoeConfig(**sizes) if kind == "qwen3_moe" else transformers.Qwen3Config(**sizes)
    model = (transformers.Qwen3MoeForCausalLM if kind == "qwen3_moe" else transformers.Qwen3ForCausalLM)(config).eval()
    model.save_pretrained(folder)
    assert len(fast) < config.vocab_size
    return model


def perplexity_there(folder, stream, length):
    """Return the perplexity of a folder's model in transformers, on the windows of fairseq-eval-lm."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), exported(folder)
    file = TokenFile(stream / "test")
    end, tokens = tokenizer.eos_token_id, file.ids.astype("int64") - 4
    tokens[file.ids == 2] = end
    ids = torch.cat([torch.tensor([end]), torch.from_numpy(tokens)])
    nats = 0.0
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0].double()
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(nats / (len(ids) - 1))


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {}), ("qwen3", TIED), ("qwen3_moe", FOUR_LAYERS)])
def test_an_imported_and_exported_model_keeps_its_perplexity_and_vocabulary(kind, sizes, tmp_path):
    model = write_folder(tmp_path / "model", kind, **sizes)
    stream = write_stream(tmp_path, "--tokenizer", str(tmp_path / "model"))
    assert main([str(tmp_path / "model"), "--out", str(tmp_path / "a.pt"), "--stream", str(stream)]) == 0
    assert export([str(tmp_path / "a.pt"), "--out", str(tmp_path / "back")]) == 0
    before = perplexity_there(tmp_path / "model", stream, 20)
    here = evaluate(stream, tmp_path / "a.pt", "--tokens-per-sample", "20")["perplexity"]
    assert float(here) == pytest.approx(before, rel=5e-6)
    assert perplexity_there(tmp_path / "back", stream, 20) == pytest.approx(before, rel=1e-6)
    back = exported(tmp_path / "back")
    assert back.config.vocab_size == 347 and back.config.max_position_embeddings == 40
    assert type(back) is type(model) and back.config.tie_word_embeddings == model.config.tie_word_embeddings
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    for name in ("eos_token_id", "pad_token_id", "router_aux_loss_coef"):
        assert getattr(back.config, name, None) == getattr(model.config, name, None)


def test_an_imported_model_gets_experts_learns_from_a_stream_and_is_exported(tmp_path):
    write_folder(tmp_path / "model")
    stream = write_stream(tmp_path, "--tokenizer", str(tmp_path / "model"))
    length = ("--tokens-per-sample", "20")
    assert main([str(tmp_path / "model"), "--out", str(tmp_path / "a.pt")]) == 0  # with the same dict.txt as the stream
    grown = ["--out", f"{tmp_path}/grown.pt", "--method", "copy", "--experts", "3", "--cpu"]
    assert "--noise 0: " in scripts.refused(grow, tmp_path, "--path", tmp_path / "a.pt", *grown, "--noise", "0")
    assert grow(["--path", str(tmp_path / "a.pt"), *grown]) in (0, None)
    # no option of its shape is given: they are those of the checkpoint
    words = ["--arch", "alma_transformer_lm", *length, "--lr", "0.003", "--megabatch", "0"]
    train_model(stream, tmp_path, *words, "--finetune-from-model", str(tmp_path / "grown.pt"), shape=())
    assert export([str(tmp_path / "checkpoint_last.pt"), "--out", str(tmp_path / "back")]) == 0
    figures = (evaluate(stream, tmp_path / name, *length) for name in ("a.pt", "checkpoint_last.pt"))
    before, here = (float(each["perplexity"]) for each in figures)
    assert here < 0.95 * before
    assert perplexity_there(tmp_path / "back", stream, 20) == pytest.approx(here, rel=5e-6)
    config = exported(tmp_path / "back").config
    assert (config.model_type, config.num_experts, config.vocab_size) == ("qwen3_moe", 4, 347)
    card = (tmp_path / "back/README.md").read_text()
    num_params = sum(tensor.numel() for tensor in load_file(tmp_path / "back/model.safetensors").values())
    assert f"| parameters | {num_params:,} |" in card and "the licence of that model applies" in card
    assert "puts\nno token before a text, but fairseq_alma trains with `<|end|>` there." in card
    path = tmp_path / "model/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "NFC"}}))
    line = refused(tmp_path, path.parent, "--out", tmp_path / "b.pt", "--stream", stream)
    assert "found another tokenizer; prepare" in line


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3", {"model_type": "llama"}, "expected model_type qwen3 or qwen3_moe, found 'llama'"),
        ("qwen3", {"hidden_act": "gelu"}, "expected hidden_act 'silu' for alma_transformer_lm, found 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias False for alma_transformer_lm, found True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window False for alma_transformer_lm, found True"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "expected rope_type 'default' for"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": True}}, "for rope_theta, found True"),
        ("qwen3", {"num_attention_heads": 3}, "modulo num_key_value_heads 0 for"),
        ("qwen3", {"vocab_size": 100}, "expected a tokenizer with at most 100 tokens, as in the model"),
        ("qwen3", {"hidden_size": "16"}, "hidden_size"),
        ("qwen3", {"num_hidden_layers": 0, "layer_types": []}, "expected num_hidden_layers 1 for"),
        ("qwen3_moe", {"num_experts_per_tok": 2}, "num_experts_per_tok 1 for alma_transformer_lm, found 2"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "found num_experts 4 in no layer"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types ['full_attention'] for"),
        ("qwen3_moe", {"norm_topk_prob": True}, "norm_topk_prob False for alma_transformer_lm, found True"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "found num_experts 4 in layers 0 (numbered"),
        ("qwen3_moe", {"moe_intermediate_size": 12}, "for alma_transformer_lm, found 12"),
        ("qwen3", lambda old: old.update(more=torch.ones(2)), "has 1 unexpected tensor(s)"),
        ("qwen3", lambda old: old.pop("model.norm.weight"), "lacks 1 tensor(s)"),
        ("qwen3", lambda old: old.pop("lm_head.weight"), "do not match config.json ('lm_head.weight')"),
        ("qwen3", lambda old: old.update({"lm_head.weight": torch.ones(346, 16)}), "with a wrong shape"),
        ("qwen3", lambda w: w.update({"model.norm.weight": torch.ones(16).int()}), "expected floating-point weights"),
    ],
)
def test_an_unsupported_configuration_and_weights_of_another_are_refused_in_one_line(kind, changes, named, tmp_path):
    write_folder(tmp_path / "model", kind)
    path, weights = (tmp_path / "model" / name for name in ("config.json", "model.safetensors"))
    if callable(changes):
        changes(tensors := load_file(weights))
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert named in refused(tmp_path, tmp_path / "model", "--out", tmp_path / "a.pt")


def test_weights_in_several_files_are_the_same_model(tmp_path):
    model = write_folder(tmp_path / "model", max_position_embeddings=40960)
    model.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "parts")
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(parts) > 1
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "parts/model-00099-of-00099.safetensors")  # stale
    for name in ("model", "parts"):
        assert main([str(tmp_path / name), "--out", str(tmp_path / f"{name}.pt")]) == 0
    checkpoints = [read_checkpoint(tmp_path / f"{name}.pt") for name in ("model", "parts")]
    task = checkpoints[0]["cfg"]["task"]
    assert checkpoints[0]["cfg"]["model"]["symbol_ids"] == "[null, null, 300, null]"  # a text may contain <|user|>
    assert (task["tokens_per_sample"], task["max_target_positions"], task["seed"]) == (1024, 40960, 1)
    whole, joined = (each["model"] for each in checkpoints)
    assert whole.keys() == joined.keys() and all(torch.equal(whole[name], joined[name]) for name in whole)
    parts[0].unlink()
    line = refused(tmp_path, tmp_path / "parts", "--out", tmp_path / "a.pt")
    assert f"{parts[0].name}: missing or damaged (No such file" in line


def test_other_folders_and_streams_are_refused(stream, tmp_path):
    out = ["--out", tmp_path / "a.pt"]
    write_folder(tmp_path / "model")
    assert "found another tokenizer; prepare" in refused(tmp_path, tmp_path / "model", *out, "--stream", stream)
    assert "no such folder" in refused(tmp_path, tmp_path / "none", *out)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 100)
    line = refused(tmp_path, tmp_path / "model", *out)
    assert "model.safetensors: missing or damaged" in line and "give a folder written by save_pretrained" in line
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert "tokenizer.json: no such file" in refused(tmp_path, tmp_path / "model", *out)
