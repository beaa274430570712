"""An exported folder: logits, ids, generation and training are those of the model here."""

import json

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from transformers import AutoTokenizer

from fairseq_alma.cli.export import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from tests.exchange.conftest import EOS, KINDS, LONGEST, PAD, exported, save
from tests.models.ensembles import load, switch_config


def here(path, tokens, stream):
    model = load(path, StreamTokenizer.open(stream).vocab_size)
    with torch.no_grad():
        return model(tokens)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_on_real_text_are_those_of_the_model_here(kind, folders, checkpoints, stream, test_ids):
    needed = here(checkpoints[kind], test_ids, stream)
    is_real = test_ids != PAD
    assert not is_real.all() and needed.std() > 0.1
    model = exported(folders[kind])
    with torch.no_grad():
        for found in (model(test_ids).logits, model(test_ids, attention_mask=is_real.long()).logits):
            torch.testing.assert_close(found[is_real], needed[is_real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_and_a_cache_change_no_logits(kind, folders, test_ids):
    model, length = exported(folders[kind]), 9
    rows = torch.stack([test_ids[0, :length], torch.cat([torch.tensor([PAD] * 4), test_ids[1, : length - 4]])])
    mask = (rows != PAD).long()
    with torch.no_grad():
        whole = model(rows, attention_mask=mask).logits
        alone = model(test_ids[1:2, : length - 4]).logits
        cache = None
        for step, size in ((0, 6), (6, 2), (8, 1)):
            part = model(rows[:, step : step + size], attention_mask=mask[:, : step + size], past_key_values=cache)
            cache = part.past_key_values
            real = mask[:, step : step + size].bool()
            torch.testing.assert_close(part.logits[real], whole[:, step : step + size][real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[1, 4:], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["tree", "ensemble"])
def test_greedy_generation_is_that_of_fairseqs_generator(kind, folders, checkpoints, stream):
    dictionary, opened = Dictionary.load(str(stream / "dict.txt")), StreamTokenizer.open(stream)
    real = load(checkpoints[kind], opened.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folders[kind], trust_remote_code=True)
    model = exported(folders[kind])
    prompts = ["the cat sat", "dogs"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0
    texts = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8, do_sample=False), skip_special_tokens=True)
    for prompt, text in zip(prompts, texts, strict=True):
        line = " ".join(opened.encode(prompt))
        tokens = dictionary.encode_line(line, add_if_not_exist=False, append_eos=False).long().unsqueeze(0)
        source = torch.cat([torch.tensor([[EOS]]), tokens], dim=1)
        sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.size(1)])}}
        # as fairseq-interactive: the prompt is forced, and the sequence begins with eos
        generator = SequenceGenerator([real], dictionary, beam_size=1, max_len_a=0, max_len_b=LONGEST - 1)
        found = generator.generate([real], sample, prefix_tokens=tokens, bos_token=EOS)[0][0]["tokens"]
        needed = opened.decode(dictionary.symbols[token] for token in found.tolist()[: tokens.size(1) + 8])
        assert text == needed and len(text) > len(prompt)


def test_the_tokenizer_gives_the_ids_of_the_test_set(folders, stream):
    check_ids(folders["switch"], stream)


def test_the_ids_are_those_of_a_sentencepiece_stream_too(sentencepiece_stream, tmp_path):
    path = save(tmp_path / "a.pt", switch_config(), 0, sentencepiece_stream)
    assert main([str(path), "--out", str(tmp_path / "folder")]) == 0
    check_ids(tmp_path / "folder", sentencepiece_stream)


def check_ids(folder, stream):
    opened, tokenizer = StreamTokenizer.open(stream), AutoTokenizer.from_pretrained(folder)
    manifest = Stream.open(stream)
    file = TokenFile(manifest.prefix(manifest.split("test")))
    start = 0
    for size in file.sizes.tolist():
        ids = file.ids[start : start + size].tolist()
        text = opened.decode(opened.symbols[token - 4] for token in ids[:-1])
        assert "\ufffd" not in text
        assert tokenizer(text)["input_ids"] == [EOS, *ids[:-1]]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        start += size
    assert [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id] == [
        2,
        2,
        1,
        3,
    ]
    literal = "</s> <s><pad> <unk> </s"
    assert tokenizer(literal, add_special_tokens=False)["input_ids"] == [
        token + 4 for token in opened.encode_batch([literal])[0]
    ]


def test_router_logits_and_balance_loss_are_returned_as_mixtral_returns_them(folders, checkpoints, stream, test_ids):
    model = exported(folders["tree"])
    real = load(checkpoints["tree"], StreamTokenizer.open(stream).vocab_size)
    rows = test_ids[:2]
    with torch.no_grad():
        found = model(rows, labels=rows, output_router_logits=True)
        plain = model(rows, labels=rows)
        statistics = real(rows)[1]
    needed = sum(layer.balance_loss for layer in statistics["switch"])
    torch.testing.assert_close(found.aux_loss, needed)
    torch.testing.assert_close(found.loss, plain.loss + 0.01 * needed)
    assert plain.aux_loss is None and plain.router_logits is None
    for logits, routing in zip(found.router_logits, statistics["routing"], strict=True):
        torch.testing.assert_close(logits.softmax(dim=-1), routing.probs)


def test_the_files_say_what_the_model_is(folders):
    folder = folders["ensemble"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_alma.py",
        "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    weights = [(group["members"], round(group["weight"], 6)) for group in config["groups"]]
    assert weights == [([0], 0.111111), ([1], 0.222222), ([2, 3], 0.333333), ([4], 0.333333)]
