"""``load_model``: losses are those of fairseq-eval-lm, text is that of fairseq's generator."""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import fairseq_alma
from fairseq_alma.data.tokens import EOS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.loaded_model import cut, load_model
from tests.exchange.conftest import LONGEST, checkpoints, stream  # noqa: F401
from tests.text.stock_commands import evaluate


def test_windows_of_a_document_follow_each_other():
    assert list(cut([2, 5, 6, 7, 2], 2)) == [([2, 5], [5, 6]), ([6, 7], [7, 2])]
    assert list(cut([2, 2], 4)) == [([2], [2])]


@pytest.mark.parametrize("kind", ["mixture", "switch", "ensemble"])
def test_losses_are_those_of_fairseq_eval_lm(kind, checkpoints, stream):  # noqa: F811
    ids = [EOS, *TokenFile(stream / "test").ids.tolist()]
    needed = evaluate(stream, checkpoints[kind], "--tokens-per-sample", str(LONGEST))
    losses = torch.cat(load_model(checkpoints[kind]).losses(list(cut(ids, LONGEST)))).double() / math.log(2)
    assert losses.mean().item() == pytest.approx(float(needed["loss"]), rel=1e-6)


def test_documents_are_scored_separately_without_special_tokens(checkpoints):  # noqa: F811
    model = load_model(checkpoints["dense"])
    texts = ["the cat sat on a mat while naïve dogs <barked> at 42", "dogs", "the </s> was never known 北京 🙂", ""]
    scores = model.score(texts)
    assert [score.num_bytes for score in scores] == [len(text.encode()) for text in texts]
    assert scores[2].num_tokens > 6 and math.isnan(scores[3].bits_per_byte)
    for text, score in zip(texts, scores, strict=True):
        (alone,) = model.score(text)
        assert (alone.bits, alone.end_bits) == pytest.approx((score.bits, score.end_bits), rel=1e-5)
    with pytest.raises(AlmaError, match="correct the text or tokenizer"):
        model.score([math.nan])  # a missing text of a DataFrame
    table = fairseq_alma.score(model, "dogs")
    assert len(table) == 1 and table.bits_per_byte[0] == pytest.approx(scores[1].bits / 4, rel=1e-5)


def test_the_script_on_the_page_counts_no_line_feeds(checkpoints, checkout, tmp_path, monkeypatch, capsys):  # noqa: F811
    code = (checkout / "docs/how-to/export.md").read_text("utf-8").partition("# bits.py")[2].partition("```")[0]
    (tmp_path / "held_out.txt").write_text("the cat sat\ndogs\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bits.py", str(checkpoints["dense"])])
    exec(code, {})
    needed = sum(each.bits for each in load_model(checkpoints["dense"]).score(["the cat sat", "dogs"])) / 15  # bytes
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(needed, rel=1e-5)


def test_text_follows_a_prompt_and_is_the_same_for_the_same_seed(checkpoints):  # noqa: F811
    model = load_model(checkpoints["ensemble"])
    greedy = model.generate("the cat", 6)
    assert greedy.startswith("the cat") and greedy == model.generate("the cat", 6, seed=1, top_k=1)
    state, sampled = torch.get_rng_state(), model.generate("the cat", 20, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(lambda _: model.generate("the cat", 20, seed=3), range(8))} == {sampled}
    assert model.generate("the cat", 2, seed=1, temperature=0.001)  # the probability of the prompt is 0 in fp32
    with pytest.raises(AlmaError, match=r"the model supports at most 24 tokens .*; give a shorter prompt"):
        model.generate("moons " * 30)
    both = {"top_k": 2, "top_p": 0.5}
    for how in ({"max_new_tokens": 0}, {"temperature": 0.0}, {"top_k": 0}, {"top_k": 9999}, {"top_p": 1.1}, both):
        with pytest.raises(AlmaError, match=", ".join(f"{name} {value}" for name, value in how.items()) + ": expected"):
            model.generate("the cat", **{"seed": 1, **how})
    with pytest.raises(AlmaError, match="need sampling; give a seed"):
        model.generate("the cat", top_k=2)


def test_the_text_begins_with_the_prompt_also_if_the_tokenizer_normalizes(checkpoints, stream, tmp_path):  # noqa: F811
    model, path = load_model(checkpoints["dense"]), tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(model.tokenizer.file.read_text()), "normalizer": {"type": "Lowercase"}}))
    text = model.generate("the cat", 6).removeprefix("the cat")
    assert replace(model, tokenizer=StreamTokenizer(path)).generate("The CAT", 6) == "The CAT" + text


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(AlmaError, match=r"load an exported folder with transformers"):
        fairseq_alma.load_model(tmp_path)
