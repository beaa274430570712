"""``alma-import``: a GPT-2 of transformers becomes a checkpoint that computes the same, grows and trains."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import training_flags
from fairseq_alma.cli.export import main as export
from fairseq_alma.cli.grow import main as grow
from fairseq_alma.cli.import_model import main
from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError
from tests import scripts
from tests.exchange.conftest import exported
from tests.models.ensembles import load

refused = partial(scripts.refused, main)

SIZES = {"n_positions": 24, "n_embd": 16, "n_layer": 4, "n_head": 2}
END = 7


def write_folder(folder, stream, **options):
    """Write a GPT-2 with random weights, as transformers itself does, with a stream's tokenizer."""
    torch.manual_seed(0)
    config = GPT2Config(**{**SIZES, "vocab_size": 350, "eos_token_id": END, **options})
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((stream / "tokenizer" / "tokenizer.json").read_bytes())
    return model


@pytest.mark.parametrize("options", [{}, {"n_inner": 24, "activation_function": "relu"}])
def test_the_imported_model_gives_the_tokens_the_same_logits(stream, tmp_path, options):
    model = write_folder(tmp_path / "gpt2", stream, **options)
    assert main([str(tmp_path / "gpt2"), "--out", str(tmp_path / "dense.pt"), "--stream", str(stream)]) == 0
    num_tokens = StreamTokenizer.open(stream).vocab_size
    tokens = torch.randint(num_tokens, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        needed = model(tokens).logits[..., :num_tokens]
        found = load(tmp_path / "dense.pt", num_tokens)(tokens + 4)[0]
    torch.testing.assert_close(found[..., 4:], needed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[..., :4], needed[..., END, None].expand(-1, -1, 4), rtol=1e-4, atol=1e-5)


def test_it_grows_without_a_change_of_the_loss_and_goes_out_again(stream, tmp_path):
    write_folder(tmp_path / "gpt2", stream)
    dense, grown = str(tmp_path / "dense.pt"), str(tmp_path / "grown.pt")
    main([str(tmp_path / "gpt2"), "--out", dense, "--stream", str(stream)])
    assert read_checkpoint(dense)["task_state"]["alma_dictionary_sha256"] == Stream.open(stream).dictionary_sha256
    words = ["--method", "split", "--experts", "1", "--stream", str(stream), "--cpu"]
    assert grow(["--path", dense, "--out", grown, *words]) == 0
    assert export([grown, "--out", str(tmp_path / "out")]) == 0
    num_tokens = StreamTokenizer.open(stream).vocab_size
    tokens = torch.randint(4, num_tokens, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = load(dense, num_tokens)(tokens)[0]
        torch.testing.assert_close(load(grown, num_tokens)(tokens)[0], before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(exported(tmp_path / "out")(tokens).logits, before, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def grown(stream, tmp_path_factory):
    """An imported model that has grown, and the options of its architecture."""
    folder = tmp_path_factory.mktemp("imported")
    write_folder(folder / "gpt2", stream)
    main([str(folder / "gpt2"), "--out", str(folder / "dense.pt"), "--stream", str(stream)])
    words = ["--method", "split", "--experts", "1", "--stream", str(stream), "--cpu"]
    assert grow(["--path", str(folder / "dense.pt"), "--out", str(folder / "grown.pt"), *words]) == 0
    return folder / "grown.pt"


def stream_words(stream, run, start, *options):
    flags = training_flags(read_checkpoint(start)["cfg"]["model"]).split()
    train = ["--criterion", "alma_switch_cross_entropy", "--optimizer", "adam", "--lr", "1e-9", "--max-update", "1"]
    words = ["--stream", str(stream), "--run", str(run), "--finetune-from-model", str(start), *options]
    return [*words, "--", *flags, *train, "--batch-size", "4", "--num-workers", "0", "--cpu"]


def test_a_stream_goes_on_from_it_and_each_stage_is_exported_for_an_evaluation(stream, grown, tmp_path):
    evaluate = 'cp {export}/config.json {run}; echo "{\\"size\\": $(stat -c %s {export}/model.safetensors)}"'
    words = ["--learner", "ens", "--num-members", "2", "--wait", "2", "--then-evaluate", evaluate]
    assert alma_stream(stream_words(stream, tmp_path / "R", grown, *words)) == 0
    needed = read_checkpoint(grown)["model"]
    for member in (0, 1):
        found = read_checkpoint(tmp_path / f"R/stage-000/member-{member}/checkpoint_last.pt")["model"]
        for name, weights in needed.items():
            torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6)
    record = json.loads((tmp_path / "R/stage-000/stage.json").read_text())
    assert (record["num_members"], record["num_experts"]) == (2, 2)
    assert record["evaluation"]["figures"]["size"] > 4 * record["num_params"]  # both members, in fp32
    assert len(json.loads((tmp_path / "R/config.json").read_text())["members"]) == 2
    (tmp_path / "copy.pt").write_bytes(grown.read_bytes())
    again = stream_words(stream, tmp_path / "R", tmp_path / "copy.pt", *words)
    with pytest.raises(
        AlmaError, match=r"run.json: the run was begun with other options \(--finetune-from-model .* then"
    ):
        alma_stream(again)


def test_a_stream_does_not_begin_with_what_is_no_model_of_its_tokens(stream, sentencepiece_stream, grown, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    for start, on, message in (
        (grown, sentencepiece_stream, "grown.pt: trained with another tokenizer"),
        (tmp_path / "text.pt", stream, "text.pt: no checkpoint"),
        (tmp_path / "none.pt", stream, "none.pt: no such checkpoint file"),
        (tmp_path, stream, "a folder, no file; give a checkpoint that alma-import"),
    ):
        words = stream_words(on, tmp_path / "R", grown)
        with pytest.raises(AlmaError, match=message):
            alma_stream([str(start) if word == str(grown) else word for word in words])
    assert not (tmp_path / "R").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type 'llama' found"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False found"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06 found"),
        ({"activation_function": "silu"}, "activation_function 'silu' found"),
        ({"n_head": 3}, "n_head 3 does not divide"),
        ({"n_layer": 5}, "there is no h.4.ln_1.weight in it"),
        ({"n_embd": 32}, "not the weights of its config.json"),
        ({"n_positions": 25}, "not the weights of its config.json"),
        ({"vocab_size": 3, "eos_token_id": 0}, "the tokenizer has"),
        ({"n_layer": "four"}, "$.n_layer is 'four'"),
        ({"n_layer": 3}, "12 tensor(s) that alma_switch_lm has no part for, 'h.3.attn.c_attn.bias' the first"),
        ({"eos_token_id": [END]}, "eos_token_id [7] found, a token from 0 to 349 is needed"),
        ({"eos_token_id": "7"}, "eos_token_id '7' found"),
        ({"eos_token_id": -1}, "eos_token_id -1 found"),
        ({"eos_token_id": 350}, "eos_token_id 350 found"),
    ],
)
def test_what_cannot_be_expressed_is_one_line(stream, tmp_path, changes, named):
    write_folder(tmp_path / "gpt2", stream)
    path = tmp_path / "gpt2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert named in refused(tmp_path, tmp_path / "gpt2", "--out", tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (lambda old: {"h.0.attn.c_attn.lora_A.weight": torch.ones(2, 16)}, "1 tensor(s) that alma_switch_lm has no"),
        (lambda old: {"lm_head.weight": old["transformer.wte.weight"] + 1}, "lm_head.weight is not wte.weight"),
        (lambda old: {"transformer.wte.weight": old["transformer.wte.weight"].int()}, "is torch.int32"),
        (lambda old: {"wte.weight": old["transformer.wte.weight"].clone()}, "two tensors are named wte.weight"),
    ],
)
def test_tensors_that_would_not_be_used_or_are_none_are_one_line(stream, tmp_path, alter, named):
    write_folder(tmp_path / "gpt2", stream)
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, **alter(tensors)}, path, metadata={"format": "pt"})
    assert named in refused(tmp_path, tmp_path / "gpt2", "--out", tmp_path / "a.pt")


def test_the_causal_mask_and_the_tied_outputs_that_files_may_have_are_no_other_model(stream, tmp_path):
    write_folder(tmp_path / "gpt2", stream)
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    more = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24).bool(),
        "lm_head.weight": tensors["transformer.wte.weight"],
    }
    save_file({**tensors, **{name: each.clone() for name, each in more.items()}}, path, metadata={"format": "pt"})
    assert main([str(tmp_path / "gpt2"), "--out", str(tmp_path / "a.pt")]) == 0


def test_weights_in_several_files_are_the_same_model(stream, tmp_path):
    model = write_folder(tmp_path / "gpt2", stream)
    model.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    shutil.copy(tmp_path / "gpt2" / "tokenizer.json", tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for name in ("gpt2", "parts"):
        assert main([str(tmp_path / name), "--out", str(tmp_path / f"{name}.pt"), "--stream", str(stream)]) == 0
    whole, parts = (read_checkpoint(tmp_path / f"{name}.pt")["model"] for name in ("gpt2", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    first = next(iter(entries))
    for file, message in (
        ("../gpt2/model.safetensors", "'../gpt2/model.safetensors' found, the name of a file of safetensors beside it"),
        ("pytorch_model.bin", "'pytorch_model.bin' found, the name of a file"),
        ("none.safetensors", "there is no none.safetensors"),
        (7, "$.weight_map[...] is"),
    ):
        index.write_text(json.dumps({"weight_map": {**entries, first: file}}))
        assert message in refused(tmp_path, tmp_path / "parts", "--out", tmp_path / "a.pt")


def test_other_folders_and_streams_are_one_line(stream, sentencepiece_stream, tmp_path):
    out = ["--out", tmp_path / "a.pt"]
    write_folder(tmp_path / "gpt2", stream)
    line = refused(tmp_path, tmp_path / "gpt2", *out, "--stream", sentencepiece_stream)
    assert "its tokenizer is not that of" in line
    assert "no such folder" in refused(tmp_path, tmp_path / "none", *out)
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"x" * 100)
    assert "no file of safetensors, or damaged" in refused(tmp_path, tmp_path / "gpt2", *out)
    (tmp_path / "gpt2" / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "gpt2" / "tokenizer.json")
    assert "tokenizer.json: a pipe, a device or a folder" in refused(tmp_path, tmp_path / "gpt2", *out)
    (tmp_path / "gpt2" / "tokenizer.json").unlink()
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    assert "there is no model.safetensors" in refused(tmp_path, tmp_path / "gpt2", *out)
