"""An exported folder: logits, ids, generation and training in transformers are those of the model here."""

import json
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.cli.export import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from fairseq_alma.exchange import export as exporting
from fairseq_alma.exchange.tokenizer_files import tokenizer_files
from tests import scripts
from tests.exchange.conftest import EOS, KINDS, LONGEST, PAD, TEXT, exported, logits_here, save, transformer_config

refused = partial(scripts.refused, main)

ELSEWHERE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_alma", "data_prep", "tests"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
rows, saved, *folders = torch.load(sys.argv[1]), *sys.argv[2:]
for folder in folders:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__module__.startswith("transformers.models.qwen3")
    logits = model(rows, attention_mask=(rows != 1).long()).logits
    torch.save(logits, f"{folder}.logits")
    write = pipeline("text-generation", model=folder)
    text = write("the cat sat", do_sample=False, max_new_tokens=5)[0]["generated_text"]
    prompts = ["the cat sat on a mat", "dogs"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0 and batch["input_ids"][0, 0] == 2
    how = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    together = model.generate(**batch, **how)
    assert torch.equal(model.generate(**batch, use_cache=False, **how), together)
    for prompt, ids in zip(prompts, together):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), **how)[0]
        assert ids[-len(alone):].tolist() == alone.tolist()
    model.save_pretrained(saved)
    again = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert torch.equal(again(rows).logits, model(rows).logits)
    print(ascii(text))
"""


def perplexity(logits, rows):
    logits = logits[:, :-1].flatten(0, 1).double()
    return torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), ignore_index=PAD).exp().item()


def test_a_folder_works_without_fairseq_and_without_this_package(folders, checkpoints, stream, test_ids, tmp_path):
    torch.save(test_ids, tmp_path / "rows.pt")
    words = ["-c", ELSEWHERE, "rows.pt", "saved", *(str(folders[kind]) for kind in KINDS)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(line.startswith("'the cat sat") for line in done.stdout.splitlines())
    is_real = test_ids != PAD
    for kind in KINDS:
        needed, found = logits_here(checkpoints[kind], test_ids, stream), torch.load(f"{folders[kind]}.logits")
        assert needed.std() > 0.3
        torch.testing.assert_close(found[is_real], needed[is_real], rtol=1e-4, atol=1e-4)
        assert perplexity(found, test_ids) == pytest.approx(perplexity(needed, test_ids), rel=1e-6)


def test_the_configuration_states_what_transformers_would_otherwise_assume(folders):
    config = exported(folders["mixture"]).config
    assert config.head_dim == 6 and config.num_key_value_heads == 2 and config.rms_norm_eps == 1e-3
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert config.max_position_embeddings == LONGEST
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (4, 1, False)
    assert (config.decoder_sparse_step, config.mlp_only_layers) == (1, [0, 2])
    assert [exported(folders[kind]).config.tie_word_embeddings for kind in ("tied", "dense")] == [True, False]
    for each in (config, exported(folders["dense"]).generation_config):
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (2, 2, 1)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_tokenizer_gives_the_ids_of_the_test_set_and_finds_special_tokens(kind, folders, stream):
    opened, tokenizer = StreamTokenizer.open(stream), AutoTokenizer.from_pretrained(folders[kind])
    file = TokenFile(stream / "test")
    start, num_literal = 0, 0
    for size in file.sizes.tolist():
        ids = file.ids[start : start + size].tolist()
        text = opened.decode_batch([[token - 4 for token in ids[:-1]]])[0]
        assert tokenizer(text, split_special_tokens=True)["input_ids"] == [EOS, *ids[:-1]]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        num_literal += "</s>" in text
        start += size
    assert num_literal > 0
    assert [getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")] == [2, 2, 1, 3]
    assert tokenizer("cat</s>", add_special_tokens=False)["input_ids"][-1] == EOS
    assert tokenizer.padding_side == "left" and tokenizer.model_max_length == LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_trainer_lowers_the_loss_and_evaluates_and_what_it_saves_loads_again(kind, folders, test_ids, tmp_path):
    model = exported(folders[kind])
    model.config.output_router_logits = kind == "mixture"
    rows = [{"input_ids": row, "attention_mask": (row != PAD).long()} for row in test_ids]
    rows = [{**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)} for row in rows]
    settings = TrainingArguments(
        str(tmp_path), max_steps=12, learning_rate=0.01, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=6,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 2
    trainer.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(exported(tmp_path / "saved")(test_ids).logits, model(test_ids).logits)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ensemble", "member of the ensemble, or evaluate the checkpoint with recipes/lm_eval/evaluate.py (text only)"),
        ("switch", "has no architecture for alma_switch_lm; export a model of alma_transformer_lm, or evaluate"),
        ("split", "transformers has no architecture for the gate trees of --method split; grow with --method copy, or"),
        ("dropping", "drop tokens as --eval-capacity-factor 1 does; train with --eval-capacity-factor 0, or evaluate"),
    ],
)
def test_a_model_without_a_stock_architecture_is_refused_in_one_line(kind, said, checkpoints, tmp_path):
    assert said in refused(tmp_path, checkpoints[kind], "--out", tmp_path / "out")


def test_other_streams_and_files_and_an_existing_folder_are_refused(checkpoints, sentencepiece_stream, tmp_path):
    out = ["--out", tmp_path / "out"]
    assert f"--out {tmp_path}: expected a new folder" in refused(tmp_path, checkpoints["dense"], "--out", tmp_path)
    path = save(tmp_path / "a.pt", transformer_config(), 0, sentencepiece_stream)
    assert "train on a stream with a tokenizer.json" in refused(tmp_path, path, *out)
    assert "found another tokenizer" in refused(tmp_path, checkpoints["dense"], *out, "--stream", sentencepiece_stream)
    assert "not a stream (no stream.json found)" in refused(tmp_path, checkpoints["dense"], *out, "--stream", tmp_path)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "text.pt: not a checkpoint" in refused(tmp_path, tmp_path / "text.pt", *out)
    assert "none.pt: expected a file, found nothing" in refused(tmp_path, tmp_path / "none.pt", *out)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda checkpoint: checkpoint["cfg"]["model"].pop("rope_theta"), "the configuration is incomplete"),
        (lambda checkpoint: checkpoint["cfg"]["model"].update(head_dim=4), "tensor(s) with a wrong shape"),
        (lambda checkpoint: checkpoint["model"].pop("decoder.embed_tokens.weight"), "the configuration is incomplete"),
        (lambda checkpoint: checkpoint["model"].pop("decoder.norm.weight"), "the checkpoint lacks 1 tensor(s)"),
    ],
)
def test_a_checkpoint_whose_configuration_and_weights_do_not_fit_is_one_line(alter, said, checkpoints, tmp_path):
    checkpoint = read_checkpoint(checkpoints["dense"], mmap=False)
    alter(checkpoint)
    write_checkpoint(checkpoint, tmp_path / "a.pt")
    assert said in refused(tmp_path, tmp_path / "a.pt", "--out", tmp_path / "out")


def test_a_failed_export_removes_its_files(checkpoints, tmp_path, monkeypatch):
    full = OSError(28, "No space left on device", "model.safetensors")
    monkeypatch.setattr(exporting, "write_tensors", Mock(side_effect=full))
    assert "the disk is full" in refused(tmp_path, checkpoints["dense"], "--out", tmp_path / "out")


def test_the_files_and_the_card_say_what_the_model_is(folders, stream):
    assert sorted(path.name for path in folders["mixture"].iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    card = (folders["mixture"] / "README.md").read_text()
    assert "| experts per Switch layer | 4 |" in card and "does not belong to a run of alma-stream" in card
    assert "Qwen3MoeForCausalLM" in card and "puts\n`</s>` before a text, as in training. The" in card
    assert Stream.open(stream).fingerprint[:16] in card
    assert "experts per" not in (folders["dense"] / "README.md").read_text()
    assert "auto_map" not in json.loads((folders["mixture"] / "config.json").read_text())


def foreign_tokenizer(kind, path):
    """Write a tokenizer of another kind than alma-prep-text trains; return its path."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer({"unigram": models.Unigram, "wordpiece": models.WordPiece, "bpe": models.BPE}[kind]())
    tokenizer.normalizer = normalizers.NFKC() if kind == "bpe" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace() if kind == "wordpiece" else pre_tokenizers.Metaspace()
    trainer = {
        "unigram": trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", "<|stop|>"], unk_token="<unk>"),
        "wordpiece": trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]", "<|stop|>"]),
        "bpe": trainers.BpeTrainer(vocab_size=90, special_tokens=["</s>", "<|stop|>"]),
    }[kind]
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
    tokenizer.add_tokens([AddedToken("<pad>", special=True), "moons"])  # not in the vocabulary of the model
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "bpe"])
def test_a_foreign_tokenizer_has_its_ids_and_its_added_tokens_are_found(kind, tmp_path):
    opened = StreamTokenizer(foreign_tokenizer(kind, tmp_path / "tokenizer.json"))
    for name, content in tokenizer_files(opened, 24).items():
        (tmp_path / name).write_text(content)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat sat on moons </s> mat"
    needed = [token + 4 for token in opened.encode_batch([text])[0]]
    assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == needed
    assert tokenizer("cat<|stop|>", add_special_tokens=False)["input_ids"][-1] == opened.pieces.index("<|stop|>") + 4
    assert tokenizer(f"cat{tokenizer.eos_token}", add_special_tokens=False)["input_ids"][-1] == EOS
