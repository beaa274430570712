import math
import os

import pytest
import torch

from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, parse_gate_trees
from fairseq_alma.images.image_models import GrownLayers
from fairseq_alma.images.model_store import TRAINING_KEY, Tally, TrainedModel, read_model, read_unfinished, write_model

CONFIG = {"model": {"_name": "alma_mlp"}, "optimizer": {"_name": "adadelta"}}
GROWN = GrownLayers(trees=(GateTree.from_nested([0, [1, 2]]), GateTree.flat(3)))
STATE = {"layers.0.weight": torch.ones(1, 2, 3), "layers.0.bias": torch.ones(1, 2)}
OTHER = {"num_experts": 3, "gate_trees": "[[0]]"}
MODEL = TrainedModel(STATE, GROWN, 5, 60, {"growth_flops": 7})


def read_grown(options):
    """Return the grown layers of a network of two mixtures."""
    return GrownLayers(trees=tuple(parse_gate_trees(options["gate_trees"], 2, options["num_experts"])))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "stage-003/member-0/checkpoint_last.pt"
    write_model(path, MODEL, CONFIG)
    return path


def test_a_written_model_is_read_back(path):
    found = read_model(path, read_grown, "")
    assert found.state.keys() == STATE.keys() and all(torch.equal(found.state[name], STATE[name]) for name in STATE)
    assert (found.grown, found.num_updates, found.num_images, found.growth) == (GROWN, 5, 60, {"growth_flops": 7})
    facts = torch.load(path, weights_only=True)["extra_state"][TRAINING_KEY]
    assert facts["grown"] == {"num_experts": 3, "gate_trees": "[[0,[1,2]],[0,1,2]]"}


def with_fact(checkpoint, **fact):
    return {**checkpoint, "extra_state": {TRAINING_KEY: {**checkpoint["extra_state"][TRAINING_KEY], **fact}}}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: {**content, "extra_state": {}}, "not written by alma-stream"),
        (lambda content: with_fact(content, num_updates="many"), "damaged"),
        (lambda content: with_fact(content, grown=OTHER), "not the weights of"),
        (lambda content: {**content, "model": {"layers.0.weight": "x"}}, "damaged"),
        (lambda content: {"model": content["model"]}, "lacks 'model' or 'cfg.model'"),
        (None, "truncated"),
    ],
)
def test_a_damaged_checkpoint_is_reported_in_one_line_with_the_remedy(path, damage, reason):
    if damage is None:
        path.write_bytes(path.read_bytes()[:500])
    else:
        torch.save(damage(torch.load(path, weights_only=True)), path)
    with pytest.raises(AlmaError, match=rf"checkpoint_last\.pt: .*{reason}.*; remove /R") as error:
        read_model(path, read_grown, "remove /R")
    assert "\n" not in str(error.value)


def test_an_unfinished_training_is_read_back_and_a_damaged_one_counts_as_absent(tmp_path, capsys):
    path = tmp_path / "stage-000/member-0/training.pt"
    assert read_unfinished(path) is None
    write_checkpoint({"epoch": 3, "best": [{"w": torch.ones(2)}]}, path)
    found = read_unfinished(path)
    assert found["epoch"] == 3 and torch.equal(found["best"][0]["w"], torch.ones(2))
    assert os.listdir(path.parent) == ["training.pt"]
    path.write_bytes(b"half")
    assert read_unfinished(path) is None
    assert capsys.readouterr().err == f"note: {path}: damaged; restarting the training of the stage\n"


def logits_of(*probs):
    return torch.tensor(probs).log()


THREE, SURE = logits_of([[0.9, 0.1]], [[0.4, 0.6]], [[0.4, 0.6]]), [[[9.0, 0.0]], [[0.0, 4.0]], [[0.0, 4.0]]]


@pytest.mark.parametrize(
    ("combine", "logits", "error", "loss"),
    [
        ("probabilities", THREE, 0, -math.log(1.7 / 3)),
        ("vote", THREE, 1, -math.log(1.7 / 3)),  # each model counts once
        ("vote", logits_of([[0.9, 0.1, 0.0001]], [[0.3, 0.6, 0.1]]), 0, None),  # of equal votes the mean
        ("logits", torch.tensor(SURE), 0, math.log1p(math.exp(-1 / 3))),
        ("probabilities", torch.tensor(SURE), 1, None),
        ("probabilities", torch.tensor([[[0.0, 300.0]]]), 1, 300),  # certain and wrong
    ],
)
def test_models_are_combined_by_mean_probability_vote_or_mean_logit(combine, logits, error, loss):
    tally = Tally(combine)
    tally.add(logits)
    result = tally.result(torch.tensor([0]))
    assert result["error"] == error
    assert loss is None or result["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("combine", ["probabilities", "vote", "logits"])
def test_models_may_be_added_one_by_one(combine):
    logits = torch.randn(5, 20, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 3
    together, one_by_one = Tally(combine), Tally(combine)
    together.add(logits)
    for each in logits:
        one_by_one.add(each[None])
    assert together.result(labels) == one_by_one.result(labels)
