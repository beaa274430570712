import json
import re

import pytest
import torch

from fairseq_alma.cli.grow import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.text.grow import RECORD_KEY
from tests.text.stock_commands import evaluate, train_model

SPLIT = ("--method", "split", "--experts", "2")


def grow(trained, out, *options, path=None):
    stream = ("--stream", str(trained.stream)) if "--experts" in (options or SPLIT) else ()
    return main(["--path", str(path or trained.checkpoint), "--out", str(out), "--cpu", *stream, *(options or SPLIT)])


def loss_of(trained, path):
    return float(evaluate(trained.stream, path)["loss"])


def test_a_split_keeps_the_loss_and_the_new_checkpoint_trains(trained, tmp_path, capsys):
    grow(trained, tmp_path / "grown.pt")
    (printed,) = re.findall(r"--num-experts 6 --gate-trees '(.+)'", capsys.readouterr().out)
    assert GateTree.from_nested(json.loads(printed)[0]).num_experts == 6
    assert loss_of(trained, tmp_path / "grown.pt") == pytest.approx(loss_of(trained, trained.checkpoint), rel=1e-5)
    start = ["--finetune-from-model", str(tmp_path / "grown.pt"), "--max-update", "3"]
    model = torch.load(train_model(trained.stream, tmp_path / "m", "--megabatch", "2", *start))["cfg"]["model"]
    assert model["num_experts"] == 6
    assert model["gate_trees"] == torch.load(tmp_path / "grown.pt")["cfg"]["model"]["gate_trees"] == printed


@pytest.mark.parametrize("method", ["copy", "scratch"])
def test_copies_and_new_experts_stay_in_a_flat_tree_and_train(trained, tmp_path, method):
    grow(trained, tmp_path / "grown.pt", "--method", method, "--experts", "2")
    start = ["--finetune-from-model", str(tmp_path / "grown.pt"), "--max-update", "1"]
    model = torch.load(train_model(trained.stream, tmp_path / "m", "--megabatch", "2", *start))["cfg"]["model"]
    assert (model["num_experts"], model["gate_trees"]) == (6, "")


def test_the_experts_with_the_largest_summed_loss_are_copied_and_recorded(trained, tmp_path):
    grow(trained, tmp_path / "grown.pt", "--method", "copy", "--experts", "2", "--moe-freq", "2")  # as in the model
    (record,) = torch.load(tmp_path / "grown.pt", weights_only=True)[RECORD_KEY]
    (layer,) = record["layers"].values()
    ranked = sorted(range(4), key=lambda expert: -layer["losses"][expert])
    assert layer["expert_source"] == [0, 1, 2, 3, *ranked[:2]]
    assert sum(layer["counts"]) == record["held_out"]["num_tokens"] > 0
    assert sum(layer["losses"]) == pytest.approx(record["held_out"]["loss"] * record["held_out"]["num_tokens"])


def test_an_existing_file_is_replaced_only_with_force(trained, tmp_path):
    (tmp_path / "grown.pt").write_text("mine")
    with pytest.raises(AlmaError, match="exists already"):
        grow(trained, tmp_path / "grown.pt")
    assert (tmp_path / "grown.pt").read_text() == "mine"
    grow(trained, tmp_path / "grown.pt", "--method", "copy", "--experts", "1", "--force")
    assert torch.load(tmp_path / "grown.pt")["cfg"]["model"]["num_experts"] == 5


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda c: c["model"].pop("decoder.layers.1.switch.gate.weight"), SPLIT, "lacks 1 tensor"),
        (lambda c: c["model"].pop("decoder.embed_tokens.weight"), SPLIT, "lacks 1 tensor"),
        (lambda c: c["model"].update(extra=torch.zeros(1)), SPLIT, "1 unexpected tensor"),
        (lambda c: c["cfg"]["model"].update(num_experts=3), SPLIT, "with a wrong shape"),
        (lambda c: c["task_state"].update(alma_dictionary_sha256="0" * 64), SPLIT, "another tokenizer"),
        (len, (*SPLIT, "--tokens-per-sample", "1000"), r"--tokens-per-sample 1000: must be at most \d+"),
        (len, (*SPLIT, "--split", "train"), "no split 'train'; choose from megabatch-"),
        (len, ("--layers", "2"), "--layers 2: the model already has 2 layers; give --layers 3 or more"),
        (len, ("--method", "split", "--experts", "5"), "--experts 5: the layer has 4 experts"),
        (len, (*SPLIT, "--moe-freq", "1"), "--moe-freq 1: .* already has Switch layers; omit --moe-freq"),
        (
            lambda c: c.pop("last_optimizer_state"),
            (*SPLIT, "--select", "random", "--optimizer", "share"),
            "--optimizer share: the checkpoint has no optimizer state",
        ),
    ],
)
def test_a_checkpoint_that_cannot_grow_is_refused_and_nothing_is_written(trained, tmp_path, change, options, message):
    checkpoint = torch.load(trained.checkpoint)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "altered.pt")
    with pytest.raises(AlmaError, match=message) as error:
        grow(trained, tmp_path / "grown.pt", *options, path=tmp_path / "altered.pt")
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["altered.pt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --experts K, --layers N, or both"),
        (["--method", "split", "--layers", "4"], "--method split requires --experts; also give --experts K"),
        (["--layers", "4", "--moe-freq", "1"], "--moe-freq 1 requires --experts; also give --experts K, or remove"),
        (["--layers", "4", "--split", "test"], "--split test requires --experts"),
        (["--experts", "1"], "--experts 1: also give --method, one of copy, split, scratch"),
        (["--method", "split", "--experts", "0"], "--experts 0: expected a number of at least 1"),
        (["--method", "split", "--experts", "1", "--noise", "0.1"], "--noise"),
        (["--method", "scratch", "--experts", "1", "--select", "usage"], "--select usage"),
        (["--method", "scratch", "--experts", "1", "--split", "test"], "--split test: no expert is measured"),
    ],
)
def test_contradicting_options_are_usage_errors(trained, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main(["--path", str(trained.checkpoint), "--out", str(tmp_path / "grown.pt"), "--cpu", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
