"""An exported folder is verified before a model is built of it: each thing that is wrong with it is one line."""

import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_alma.cli.export import main as export
from fairseq_alma.cli.generate import main as generate
from fairseq_alma.cli.score import main as score
from fairseq_alma.cli.verify import main as verify
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exported_folder import SUMS
from fairseq_alma.exchange.load_model import load_model
from tests.exchange.conftest import exported

PATIENCE = 10.0  # seconds of computing


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of an exported ensemble, to be altered."""
    return shutil.copytree(folders["ensemble"], tmp_path / "folder")


def refused(folder):
    """Return the one line that a folder is refused with by all that read it."""
    began = time.process_time()
    lines = set()
    document = folder.parent / "in.jsonl"
    document.write_text('{"text": "the cat"}\n')
    for read in (
        lambda: load_model(folder),
        lambda: score([str(folder), str(document)]),
        lambda: generate([str(folder), "--prompt", "the"]),
    ):
        with pytest.raises(AlmaError) as error:
            read()
        lines.add(str(error.value))
    assert time.process_time() - began < PATIENCE
    assert len(lines) == 1
    line = lines.pop()
    assert "\n" not in line and str(folder) in line
    return line


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def flip_bits(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    for place in range(len(content) - 400, len(content), 4):
        content[place] ^= 0x40
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("alter", "file"),
    [
        (flip_bits, "model.safetensors"),
        (lambda folder: change_json(folder / "config.json", lambda config: config.update(x=1)), "config.json"),
        (lambda folder: change_json(folder / "tokenizer.json", lambda config: config.update(x=1)), "tokenizer.json"),
        (lambda folder: (folder / "modeling_alma.py").write_text("import os"), "modeling_alma.py"),
    ],
)
def test_what_is_not_as_it_was_exported_is_refused(folder, alter, file):
    alter(folder)
    line = refused(folder)
    assert f"{file}: damaged or changed" in line and f"remove {SUMS} if it was changed on purpose" in line


def test_alma_verify_looks_at_an_exported_folder(folder, capsys):
    assert verify([str(folder)]) == 0
    flip_bits(folder)
    assert verify([str(folder)]) == 1
    assert "WRONG" in (line := capsys.readouterr().out.splitlines()[-1]) and "model.safetensors: damaged or" in line


def test_a_tokenizer_of_another_model_is_refused(folder, sentencepiece_stream):
    (model,) = (sentencepiece_stream / "tokenizer").iterdir()
    shutil.copy(model, folder / "tokenizer.json")
    assert "tokenizer.json: damaged or changed" in refused(folder)


CONFIGS = {
    "heads": lambda config: config["members"][0].update(num_heads=3),
    "no heads": lambda config: config["members"][0].update(num_heads=0),
    "text for dropout": lambda config: config["members"][0].update(dropout="x"),
    "no weight": lambda config: config["groups"][0].update(weight=0),
    "no such member": lambda config: config["groups"][0].update(members=[9]),
    "padding": lambda config: config.update(pad_token_id=10**8),
    "first token": lambda config: config.update(bos_token_id=100_000),
    "positions": lambda config: config.update(max_position_embeddings=100_000),
    "positions of a member": lambda config: config["members"][0].update(max_positions=10**6),
    "no members": lambda config: config.update(members=[]),
    "dtype": lambda config: config.update(dtype="evil"),
    "code from a hub": lambda config: config.update(attn_implementation="evil/kernel"),
    "other code": lambda config: config.update(auto_map={"AutoConfig": "evil/repository--modeling.Config"}),
    "experts": lambda config: config["members"][0]["gates"][1].update(num_experts=10**9),
    "fewer experts": lambda config: config["members"][0]["gates"][1].update(num_experts=16_000_000),
    "gates": lambda config: config["members"][0].update(gates=[{"num_experts": 1}] * 10**6),
    "layers": lambda config: config["members"][0].update(num_layers=9_999, gates=[None] * 9_999),
    "a circle of choices": lambda config: config["members"][0]["gates"][1].update(
        choices=[[0, 2, None], [2, 4, 3]], row_expert=[0, 1, None, 2]
    ),
    "width": lambda config: config["members"][0].update(intermediate_size=2**24),
    "vocabulary": lambda config: config.update(vocab_size=2**24),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_makes_no_model_of_the_weights_is_refused(folder, kind):
    (folder / SUMS).unlink()
    change_json(folder / "config.json", CONFIGS[kind])
    assert "config.json and weights do not go together" in refused(folder)


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (lambda weights: weights["members.0.norm.weight"][:1].fill_(float("nan")), "infinite or no numbers"),
        (lambda weights: weights.update(more=torch.ones(1)), "has beyond its configuration 1 tensor(s), more"),
        (lambda weights: weights.pop("members.0.norm.weight"), "lacks 1 tensor(s), members.0.norm.weight"),
        (lambda weights: weights.update({"members.0.norm.weight": torch.ones(3)}), "misshapen"),
        (lambda weights: weights.update({"members.0.norm.weight": torch.ones(16).int()}), "a floating-point number"),
    ],
)
def test_weights_are_finite_and_of_the_declared_shapes(folder, alter, named):
    (folder / SUMS).unlink()
    change_weights(folder, alter)
    assert named in refused(folder)


def unpadded(content):
    content["padding"] = {
        "strategy": {"Fixed": 10**8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip


def renumbered(content):
    piece = next(iter(sorted(content["model"]["vocab"], key=content["model"]["vocab"].get, reverse=True)))
    content["model"]["vocab"][piece] = 10**6


def emptied(content):
    content["model"].update(vocab={}, merges=[])


@pytest.mark.parametrize(
    ("alter", "named"),
    [(unpadded, "fills sequences up"), (renumbered, "1,000,001 tokens"), (emptied, "a vocabulary of 4 tokens")],
)
def test_a_tokenizer_has_the_vocabulary_of_the_model(folder, alter, named):
    (folder / SUMS).unlink()
    change_json(folder / "tokenizer.json", alter)
    assert named in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", SUMS])
def test_pipes_and_devices_are_no_files_of_a_folder(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name}: a pipe, a device or a folder, no file" in refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{name}: a pipe, a device or a folder, no file" in refused(folder)


def test_sums_name_files_of_the_folder_alone(folder):
    (folder / SUMS).write_text(f"{'0' * 64}  ../secret\n")
    assert f"{SUMS}: damaged" in refused(folder)
    (folder / SUMS).write_text(f"{'0' * 64}  gone.json\n")
    assert "gone.json: no such file, but" in refused(folder)


def test_a_folder_that_was_changed_on_purpose_is_read_and_said_to_be_changed(folder, capsys):
    assert load_model(folder).generate("the", 2) and capsys.readouterr().err == ""
    model = exported(folder)
    with torch.no_grad():
        model.members[0].norm.bias += 0.5
    model.save_pretrained(folder)
    load_model(folder)
    said = capsys.readouterr().err
    assert "changed since it was exported, and saved by transformers (config.json, " in said
    (folder / SUMS).unlink()
    load_model(folder)
    assert f"there is no {SUMS} in it" in capsys.readouterr().err


def test_the_model_card_may_be_edited(folder, capsys):
    (folder / "README.md").write_text("# My model")
    load_model(folder)
    assert capsys.readouterr().err == ""


def test_the_folder_that_one_is_in_is_not_replaced(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AlmaError, match=r"--out \.: the folder that you are in"):
        export([str(checkpoints["switch"]), "--out", "."])
    assert list(tmp_path.iterdir()) == []
