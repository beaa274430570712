"""``recipes/growth/layers.py``: what layers add to the residual stream and take from the loss; what context does."""

import pytest

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.load_model import load_model
from tests.exchange.conftest import TEXT
from tests.recipes.programs import load
from tests.scripts import refused

layers = load("growth.layers")


def rows(path):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in layers.table(load_model(path), [TEXT] * 3).splitlines()[2:]
    ]


@pytest.mark.parametrize("kind", ["dense", "switch"])
def test_a_layer_whose_outputs_are_zero_adds_nothing_and_is_not_missed(kind, checkpoints, tmp_path):
    trained = rows(checkpoints[kind])
    assert all(before != behind and lost != "+0.000" for _, before, behind, lost, _ in trained)
    checkpoint = read_checkpoint(checkpoints[kind], mmap=False)
    for name, tensor in checkpoint["model"].items():
        if name.startswith("decoder.layers.1.") and (".out_proj." in name or ".fc2" in name):
            tensor.zero_()
    write_checkpoint(checkpoint, tmp_path / "zero.pt")
    changed = rows(tmp_path / "zero.pt")
    assert changed[0][:3] == trained[0][:3]
    _, before, behind, lost, _ = changed[1]
    assert before == behind and float(lost) == 0


def test_hidden_units_that_no_token_uses_are_counted(checkpoints, tmp_path):
    trained = [cells[-1] for cells in rows(checkpoints["dense"])]
    checkpoint = read_checkpoint(checkpoints["dense"], mmap=False)
    bias = checkpoint["model"]["decoder.layers.1.fc1.bias"]
    bias[:3] = -1e6
    write_checkpoint(checkpoint, tmp_path / "three.pt")
    one, *others = (cells[-1] for number, cells in enumerate(rows(tmp_path / "three.pt")) if number != 0)
    assert 3 <= int(one.removesuffix(f" of {len(bias)}")) <= 3 + int(trained[1].split()[0])
    assert others == trained[2:]
    bias[:] = -1e6
    write_checkpoint(checkpoint, tmp_path / "all.pt")
    assert rows(tmp_path / "all.pt")[1][-1] == f"{len(bias)} of {len(bias)}"
    assert "–" in [cells[-1] for cells in rows(checkpoints["switch"])]  # experts see their own tokens


def contexts(path, text=TEXT * 3):
    lines = layers.context_table(load_model(path), [text]).splitlines()[2:]
    return [float(line.strip("|").split("|")[1]) for line in lines]


def test_a_model_without_attention_and_positions_uses_one_token(checkpoints, tmp_path):
    trained = contexts(checkpoints["dense"])
    assert len(trained) == 5 and len({*trained}) > 1  # 1 to 16: it takes 24 tokens
    checkpoint = read_checkpoint(checkpoints["dense"], mmap=False)
    for name, tensor in checkpoint["model"].items():
        if ".out_proj." in name or "embed_positions" in name:
            tensor.zero_()
    write_checkpoint(checkpoint, tmp_path / "blind.pt")
    assert len({*contexts(tmp_path / "blind.pt")}) == 1
    with pytest.raises(AlmaError, match="no document of 16 tokens or more"):
        contexts(checkpoints["dense"], "short")


def test_what_cannot_be_measured_is_one_line(checkpoints, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    said = refused(layers.main, tmp_path, checkpoints["dense"], tmp_path / "empty.txt")
    assert said.endswith("empty.txt: no text in its first 500 lines")
    (tmp_path / "text.txt").write_text(TEXT)
    said = refused(layers.main, tmp_path, checkpoints["ensemble"], tmp_path / "text.txt")
    assert "an ensemble of" in said and said.endswith("give the checkpoint of one of them")
    assert "No such file" in refused(layers.main, tmp_path, checkpoints["dense"], tmp_path / "none.txt")
