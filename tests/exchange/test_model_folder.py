"""An exported folder: logits, ids, generation and training are those of the model here.

Models of images of a run: exported as safetensors, given back by the loader, joined, tested by the stock command.
"""

import json
import os
import re

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from transformers import AutoTokenizer

import fairseq_alma
from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
from fairseq_alma.checkpoints.ensemble_file import join_checkpoints
from fairseq_alma.cli.ensemble import main as ensemble
from fairseq_alma.cli.export import main
from fairseq_alma.cli.stream import main as stream_command
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import load_exported_images
from tests.exchange.conftest import EOS, KINDS, LONGEST, PAD, exported, save
from tests.images.image_streams import make_stream
from tests.models.ensembles import load, switch_config
from tests.scripts import run_script


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
        "README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors", "modeling_alma.py",
        "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    weights = [(group["members"], round(group["weight"], 6)) for group in config["groups"]]
    assert weights == [([0], 0.111111), ([1], 0.222222), ([2, 3], 0.333333), ([4], 0.333333)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_stream(folder / "S", num_megabatches=2)
    words = [
        "--learner",
        "ens",
        "--num-members",
        "2",
        "--keep-checkpoints",
        "--",
        "--width",
        "6",
        "--max-epoch",
        "6",
        "--cpu",
    ]
    assert stream_command(["--stream", str(folder / "S"), "--run", str(folder / "R"), *words]) == 0
    return folder


def members_of(run, stage):
    return [run / f"R/stage-{stage:03d}/member-{member}/checkpoint_last.pt" for member in range(2)]


def test_the_model_of_an_arrival_of_a_run_is_exported_if_it_was_kept(tmp_path, capsys):
    make_stream(tmp_path / "S", num_megabatches=2)
    for name, keep in (("plain", []), ("kept", ["--keep", "0"])):
        words = ["--stream", str(tmp_path / "S"), "--run", str(tmp_path / name), *keep, "--", "--width", "4", "--cpu"]
        assert stream_command([*words, "--max-epoch", "1"]) == 0
        assert ("only weights stay that" in capsys.readouterr().err) == (not keep)
        assert main([str(tmp_path / name), "--out", str(tmp_path / f"{name}-newest")]) == 0
    first = ["--arrival", "0", "--out", str(tmp_path / "first")]
    with pytest.raises(AlmaError, match="weights of stage 0 are not kept; alma-stream --keep ARRIVAL keeps those"):
        main([str(tmp_path / "plain"), *first])
    assert main([str(tmp_path / "kept"), *first]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "kept-newest")]
    assert weights[0] != weights[1] == (tmp_path / "plain-newest/model.safetensors").read_bytes()


def test_an_ensemble_of_image_models_predicts_what_its_record_says(run, tmp_path):
    members = members_of(run, 0)
    write_checkpoint(join_checkpoints(members, [1.0, 1.0], tmp_path / "E.pt", False), tmp_path / "E.pt")
    assert main([str(tmp_path / "E.pt"), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "E.pt").unlink()
    model, images = load_exported_images(tmp_path / "out")
    stream = Stream.open(run / "S")
    pixels, labels = test_set(stream)
    mean, std = (torch.tensor(each)[:, None, None] for each in (images.mean, images.std))
    with torch.no_grad():
        error = (model((pixels / 255 - mean) / std).argmax(dim=1) != labels).float().mean().item()
    record = json.loads((run / "R/stage-000/stage.json").read_text())
    assert error == pytest.approx(record["test"]["error"], abs=1e-6) and record["test"]["error"] < 0.7


def test_set(stream):
    """Return the pixels and labels of the test set."""
    import numpy as np

    rows = np.load(stream.root / "test.npy")
    pixels, labels = (np.load(stream.root / name)[rows] for name in ("images.npy", "labels.npy"))
    return torch.from_numpy(pixels).float(), torch.from_numpy(labels)


test_set.__test__ = False


def test_a_folder_that_is_none_is_one_line(run, tmp_path):
    with pytest.raises(AlmaError, match="there is no config"):
        load_exported_images(tmp_path)
    main([str(run / "R/stage-000/member-0/checkpoint_last.pt"), "--out", str(tmp_path / "out")])
    (tmp_path / "out/model.safetensors").open("ab").write(b"x")
    with pytest.raises(AlmaError, match=r"model\.safetensors: damaged or changed"):
        load_exported_images(tmp_path / "out")
    (tmp_path / "out/SHA256SUMS").unlink()
    main([str(run / "R/stage-000/member-0/checkpoint_last.pt"), "--out", str(tmp_path / "again")])
    (tmp_path / "again/model.safetensors").rename(tmp_path / "out/model.safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["model"]["width"] = 7
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(AlmaError, match="no weight has that size"):
        load_exported_images(tmp_path / "out")
    (tmp_path / "out/config.json").write_text('{"format": "another"}')
    with pytest.raises(AlmaError, match="format 'another' found"):
        load_exported_images(tmp_path / "out")


def validate(stream, path):
    """Return loss and error that the stock command prints for the test set."""
    words = ["fairseq-validate", str(stream), "--user-dir", os.path.dirname(fairseq_alma.__file__)]
    words += ["--task", "alma_image_classification", "--path", str(path), "--valid-subset", "test"]
    done = run_script([*words, "--batch-size", "30", "--cpu", "--num-workers", "0"])
    assert done.returncode == 0, done.stderr
    line = next(line for line in (done.stdout + done.stderr).splitlines() if "valid on 'test' subset" in line)
    return {name: float(re.search(rf"\b{name} ([\d.]+)", line)[1]) for name in ("loss", "error")}


def test_the_ensemble_of_a_stages_members_has_the_loss_and_error_of_its_record(run, tmp_path):
    record = json.loads((run / "R/stage-001/stage.json").read_text())
    assert record["num_members"] == 2
    assert ensemble([*map(str, members_of(run, 1)), "--out", str(tmp_path / "E.pt")]) == 0
    found = validate(run / "S", tmp_path / "E.pt")
    assert found["error"] == pytest.approx(record["test"]["error"], abs=1e-4)
    assert found["loss"] == pytest.approx(record["test"]["loss"], abs=2e-3)


def test_members_of_all_stages_are_kept_when_asked(run):
    assert all(path.is_file() for stage in (0, 1) for path in members_of(run, stage))


def test_models_of_other_images_do_not_make_an_ensemble(run, tmp_path):
    other = make_stream(tmp_path / "S", num_megabatches=1, num_train=40, shape=(1, 4, 4))
    words = ["--", "--width", "6", "--max-epoch", "1", "--cpu"]
    assert stream_command(["--stream", str(other), "--run", str(tmp_path / "R"), *words]) == 0
    stranger = str(tmp_path / "R/stage-000/member-0/checkpoint_last.pt")
    with pytest.raises(AlmaError, match=r"images of 16 pixels in all channels, .* has images of 64 pixels"):
        ensemble([str(members_of(run, 1)[0]), stranger, "--out", str(tmp_path / "E.pt")])
    assert not (tmp_path / "E.pt").exists()
