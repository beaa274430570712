"""``alma-score`` and ``alma-generate``: what they print is what the model says."""

import json
import math
import re

import pytest
import torch
from fairseq_cli import eval_lm

from fairseq_alma.cli.generate import main as generate
from fairseq_alma.cli.score import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from fairseq_alma.exchange.load_model import cut, load_model
from tests.exchange.conftest import EOS, LONGEST
from tests.models.ensembles import load
from tests.scripts import refused, usage_error

TEXTS = ["the cat sat on a mat while naïve dogs <barked> at 42 moons", "dogs", "the </s> was never known 北京 🙂", ""]


def documents(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def test_windows_of_a_document_follow_each_other():
    assert list(cut([5, 6, 7], EOS, 2, 0)) == [([2, 5], [5, 6]), ([6, 7], [7, 2])]
    assert list(cut([5, 6, 7], EOS, 3, 1)) == [([2, 5], [5, 6]), ([5, 6, 7], [-100, 7, 2])]
    assert list(cut([], EOS, 4, 2)) == [([2], [2])]


@pytest.mark.parametrize("kind", ["tree", "ensemble"])
def test_losses_are_those_of_the_model_here(kind, checkpoints, folders, stream, tmp_path):
    out = tmp_path / "out.jsonl"
    words = [str(documents(tmp_path)), "--window", "10", "--batch-size", "3"]
    assert main([str(checkpoints[kind]), *words, "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer = StreamTokenizer.open(stream)
    model = load(checkpoints[kind], tokenizer.vocab_size)
    for text, record in zip(TEXTS, records, strict=True):
        ids = [EOS, *[token + 4 for token in tokenizer.encode_batch([text])[0]], EOS]
        needed = []
        for start in range(0, len(ids) - 1, 10):
            part = torch.tensor([ids[start : start + 11]])
            with torch.no_grad():
                log_probs = model(part[:, :-1])[0].double().log_softmax(dim=-1)
            needed += (-log_probs[0].gather(1, part[0, 1:, None])[:, 0] / math.log(2)).tolist()
        assert record["bits"] == pytest.approx(sum(needed[:-1]), rel=1e-5)
        assert record["end_bits"] == pytest.approx(needed[-1], rel=1e-4)
        assert (record["num_tokens"], record["num_bytes"]) == (len(ids) - 2, len(text.encode()))
    assert [record["id"] for record in records] == ["d0", "d1", "d2", "d3"]
    assert records[3]["bits_per_byte"] is None
    again = tmp_path / "again.jsonl"
    main([str(folders[kind]), *words, "--out", str(again)])  # the same weights at other places of the memory
    assert [json.loads(line) for line in again.read_text().splitlines()] == [
        {name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for name, value in record.items()}
        for record in records
    ]


def test_a_sliding_window_gives_context(checkpoints, tmp_path, capsys):
    words = [str(checkpoints["switch"]), str(documents(tmp_path)), "--window", "8"]
    main(words)
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    main([*words, "--context-window", "4"])
    sliding = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert plain[1]["bits"] == sliding[1]["bits"]  # shorter than a window
    assert plain[0]["bits"] != sliding[0]["bits"] and plain[0]["num_tokens"] == sliding[0]["num_tokens"]


def test_fairseq_eval_lm_counts_the_same(checkpoints, stream, tmp_path, capsys, caplog, monkeypatch, checkout):
    manifest, tokenizer = Stream.open(stream), StreamTokenizer.open(stream)
    file, texts, start = TokenFile(manifest.prefix(manifest.split("test"))), [], 0
    for size in file.sizes.tolist():
        ids = file.ids[start : start + size - 1].tolist()
        texts.append(tokenizer.decode(tokenizer.symbols[token - 4] for token in ids))
        start += size
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main([str(checkpoints["sinusoidal"]), str(tmp_path / "in.jsonl"), "--joined"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    total = sum(record["bits"] + record["end_bits"] for record in records)
    num_tokens = sum(record["num_tokens"] + 1 for record in records)
    assert num_tokens == file.sizes.sum()
    command = ["fairseq-eval-lm", str(stream), "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu"]
    command += ["--path", str(checkpoints["sinusoidal"]), "--gen-subset", "test"]
    monkeypatch.setattr("sys.argv", [*command, "--tokens-per-sample", str(LONGEST), "--batch-size", "8"])
    monkeypatch.chdir(checkout)
    with caplog.at_level("INFO", "fairseq_cli.eval_lm"):
        eval_lm.cli_main()
    found = re.search(r"Loss \(base 2\): (\S+),", caplog.text)
    assert float(found[1]) == pytest.approx(total / num_tokens, abs=1e-4)


def test_input_that_cannot_be_scored_is_one_line(checkpoints, tmp_path):
    path = tmp_path / "in.jsonl"
    out = ["--out", tmp_path / "out.jsonl"]
    path.write_text('{"text": "a"}\nnothing\n')
    assert "in.jsonl, line 2: not JSON" in refused(main, tmp_path, checkpoints["switch"], path, *out)
    path.write_text('{"text": "a", "id": NaN}\n')
    assert "in.jsonl, line 1: not JSON (NaN found)" in refused(main, tmp_path, checkpoints["switch"], path, *out)
    path.write_text('{"body": "a"}\n')
    assert "line 1: no text under 'text'; give --field" in refused(main, tmp_path, checkpoints["switch"], path, *out)
    assert "no such file" in refused(main, tmp_path, checkpoints["switch"], tmp_path / "none", *out)
    assert "the model takes 24" in refused(main, tmp_path, checkpoints["switch"], path, "--window", "25", *out)
    assert "must be smaller" in refused(main, tmp_path, checkpoints["switch"], path, "--context-window", "24", *out)
    assert "there is no config.json" in refused(main, tmp_path, tmp_path, path, *out)


def test_text_is_streamed_and_a_seed_gives_it_again(checkpoints, folders, capsys):
    words = ["--prompt", "the cat", "--max-tokens", "6", "--seed", "3"]
    texts = []
    for path in (checkpoints["ensemble"], checkpoints["ensemble"], folders["ensemble"]):
        assert generate([str(path), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("the cat") and len(texts[0]) > 8
    generate([str(checkpoints["ensemble"]), "--prompt", "the cat", "--max-tokens", "6", "--greedy"])
    assert capsys.readouterr().out.rstrip("\n") == load_model(checkpoints["ensemble"]).generate("the cat", 6)


def test_prompts_of_a_file_are_continued_as_each_alone(checkpoints, tmp_path, capsys):
    prompts = ["the cat sat", "dogs", "", "naïve\f moons\u2028 at"]
    (tmp_path / "prompts.txt").write_text("\n".join([*prompts, ""]), encoding="utf-8")
    words = [str(checkpoints["tree"]), "--greedy", "--max-tokens", "5"]
    generate([*words, "--prompts", str(tmp_path / "prompts.txt"), "--batch-size", "2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    for prompt, row in zip(prompts, rows, strict=True):
        generate([*words, "--prompt", prompt])
        assert row == {"prompt": prompt, "text": capsys.readouterr().out.rstrip("\n")}


def test_a_prompt_has_its_own_room_whatever_stands_beside_it_and_what_is_cut_is_said(checkpoints, tmp_path, capsys):
    prompts = ["the cat sat", "moons " * 12 + "at", "", "dogs", "the cat sat"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    words = [str(checkpoints["switch"]), "--greedy", "--max-tokens", "15"]
    found = []
    for size in ("16", "2", "1"):
        generate([*words, "--prompts", str(tmp_path / "prompts.txt"), "--batch-size", size])
        printed = capsys.readouterr()
        found.append([json.loads(line) for line in printed.out.splitlines()])
        assert printed.err.endswith("tokens, the prompt's included, so 1 of 5 prompts get fewer\n")
    assert found[0] == found[1] == found[2] and [row["prompt"] for row in found[0]] == prompts
    generate([*words, "--prompt", prompts[1]])
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == found[0][1]["text"]
    assert (
        printed.err == "note: --max-tokens 15: the model takes 24 tokens, the prompt's included, so at most 10 follow\n"
    )


def test_a_prompt_that_is_too_long_is_one_line(checkpoints, tmp_path):
    line = refused(generate, tmp_path, checkpoints["tree"], "--prompt", "moons " * 30)
    assert "the model takes 24 with what follows" in line
    assert "no such file" in refused(generate, tmp_path, checkpoints["tree"], "--prompts", tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a\udce9"], "--prompt 'a\\udce9': not UTF-8; give a text in UTF-8"),
        (["--temperature", "1e-300"], "--temperature 1e-300: a number of at least 1e-20 is needed"),
    ],
)
def test_what_no_text_follows_is_a_usage_error(words, said, checkpoints, capsys):
    assert said in usage_error(capsys, generate, [str(checkpoints["tree"]), *words])


def test_the_smallest_temperature_takes_the_most_probable_token(checkpoints, capsys):
    said = []
    for words in (["--greedy"], ["--temperature", "1e-20"]):
        generate([str(checkpoints["tree"]), "--prompt", "moons", "--max-tokens", "5", *words])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_what_does_not_go_together_is_refused(checkpoints, folders, tmp_path, capsys):
    folder, stream = folders["ensemble"], tmp_path / "stream"
    for run, words in ((generate, []), (main, [documents(tmp_path), "--out", tmp_path / "out.jsonl"])):
        line = refused(run, tmp_path, folder, *words, "--stream", stream)
        assert "has a tokenizer of its own; leave --stream out" in line
    for option in ("--temperature", "--top-p", "--seed"):
        line = usage_error(capsys, generate, [str(checkpoints["tree"]), "--greedy", option, "1"])
        assert f"--greedy does not sample, so it takes no {option}" in line
