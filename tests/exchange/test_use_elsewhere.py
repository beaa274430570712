"""An exported model in the hands of others: without this package, with it imported, and in transformers' Trainer."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from fairseq_alma.exchange.exported_folder import AUTO_MAP
from fairseq_alma.exchange.modeling_alma import AlmaForCausalLM
from tests.exchange.conftest import PAD, exported

WITHOUT_PACKAGE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_alma", "data_prep", "torchaudio"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.modules["torchaudio"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
WITH_PACKAGE = """
import sys
import fairseq_alma
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "fairseq_alma.exchange.modeling_alma", type(model)
assert "fairseq" not in sys.modules
"""
FIRST_CALLS = """
import warnings
from transformers import Trainer, TrainingArguments, pipeline
folder, longest = sys.argv[1], model.config.max_position_embeddings
write = pipeline("text-generation", model=folder, trust_remote_code=True)
text = write("the cat sat", do_sample=False)[0]["generated_text"]
ids = tokenizer(text)["input_ids"]
assert text.startswith("the cat sat") and len(ids) <= longest, len(ids)
prompt = tokenizer(["the cat sat on a mat", "dogs"], return_tensors="pt", padding=True)
for options in ({"max_new_tokens": 500}, {}, {"max_length": 500}, {"max_new_tokens": 500, "num_beams": 2}):
    assert model.generate(**prompt, **options).size(1) <= longest
assert model.generate(**prompt, max_new_tokens=2).size(1) == prompt["input_ids"].size(1) + 2
rows = [{"input_ids": each, "labels": each} for each in prompt["input_ids"]]
for router in (False, True):
    model.config.output_router_logits = router
    settings = TrainingArguments(sys.argv[2], use_cpu=True, report_to=[], max_steps=1, eval_strategy="steps",
                                 eval_steps=1, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(rows).predictions.shape == (2, *prompt["input_ids"].shape[1:], model.config.vocab_size)
trainer.train()
model.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
assert torch.equal(again.eval()(**prompt).logits, model.eval()(**prompt).logits)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""
PRINT_LOSS = """
batch = tokenizer(["the cat sat on a mat", "dogs"], return_tensors="pt", padding=True)
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
print(model(**batch, labels=labels).loss.item())
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(WITHOUT_PACKAGE + FIRST_CALLS, id="without the package"),
        pytest.param(WITH_PACKAGE, id="with it", marks=pytest.mark.slow),
    ],
)
def test_a_folder_loads_anywhere(code, folders, tmp_path):
    words = [sys.executable, "-c", code + PRINT_LOSS, str(folders["ensemble"]), str(tmp_path / "saved")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "seem to have been set" not in done.stderr and "model-agnostic" not in done.stderr
    tokenizer = AutoTokenizer.from_pretrained(folders["ensemble"], trust_remote_code=True)
    batch = tokenizer(["the cat sat on a mat", "dogs"], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        needed = exported(folders["ensemble"])(**batch, labels=labels).loss.item()
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(needed, abs=1e-4)


@pytest.mark.parametrize("kind", ["tree", "umix"])
def test_trainer_lowers_the_loss_and_what_it_saves_loads_again(kind, folders, test_ids, tmp_path):
    model = exported(folders[kind])
    model.config.output_router_logits = True
    rows = [{"input_ids": row, "attention_mask": (row != PAD).long()} for row in test_ids]
    rows = [{**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)} for row in rows]
    settings = TrainingArguments(
        str(tmp_path), max_steps=12, learning_rate=0.01, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=kind == "tree",
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    gates = [parameter for name, parameter in model.named_parameters() if "gate.weight" in name]
    assert gates and all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in gates)
    trainer.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(exported(tmp_path / "saved")(test_ids).logits, model(test_ids).logits)


@pytest.mark.parametrize("kind", ["tree", "ensemble"])
def test_attention_weights_are_those_that_make_the_logits(kind, folders, test_ids):
    model, rows = exported(folders[kind]), test_ids[:3, :8]
    mask = (rows != PAD).long().index_fill(1, torch.tensor([0]), 0)
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            plain, found = model(rows, **options), model(rows, output_attentions=True, **options)
            torch.testing.assert_close(found.logits, plain.logits, rtol=1e-4, atol=1e-5)
            assert plain.attentions is None and len(found.attentions) == model.config.num_hidden_layers
            for weights in found.attentions:
                torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
                assert weights.shape[0] == 3 and weights.shape[-2:] == (8, 8) and not weights.triu(1).any()


def test_what_is_saved_with_the_package_imported_needs_it_no_more_and_anybody_may_read_it(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["switch"])
    assert type(model) is AlmaForCausalLM
    model.save_pretrained(tmp_path / "saved")
    needed = (folders["switch"] / "modeling_alma.py").read_bytes()
    assert (tmp_path / "saved" / "modeling_alma.py").read_bytes() == needed
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    modes = {path.name: path.stat().st_mode for path in folders["switch"].iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_experts_take_no_more_than_their_capacity_in_training(folders, checkpoints, stream, test_ids):
    """In training mode, without dropout, logits are those of the model here: overflow is dropped in the same order."""
    from fairseq_alma.data.tokens import StreamTokenizer
    from tests.models.ensembles import load

    real = load(checkpoints["switch"], StreamTokenizer.open(stream).vocab_size).train()
    model = exported(folders["switch"]).train()
    is_real = test_ids != PAD
    needed, found = real(test_ids)[0], model(test_ids).logits
    assert not torch.allclose(needed[is_real], real.eval()(test_ids)[0][is_real])
    torch.testing.assert_close(found[is_real], needed[is_real], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_asked_for_is_said(folders, test_ids):
    model = exported(folders["ensemble"])
    with pytest.raises(ValueError, match="the model takes 24 at most"):
        model(torch.cat([test_ids[:1], test_ids[1:2]], dim=1))
    with pytest.raises(ValueError, match="attention_mask of shape"):
        model(test_ids[:, :4], attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="5 models have embeddings each"):
        model.get_input_embeddings()
