"""fairseq's commands reject checkpoints that do not fit the model or the training."""

import re

import fairseq.models  # noqa: F401  registers the architectures
import pytest
import torch
from torch import nn

from fairseq_alma.checkpoints.checkpoint_file import refuse_other_shapes
from fairseq_alma.errors import AlmaError
from fairseq_alma.training.stage_task import check_architecture
from tests.test_any_record import with_value
from tests.text.stock_commands import train_model

OWN = {"_name": "alma_umix", "member_arch": "alma_mlp", "member_options": ""}


def checkpoint_of(model=None, **config):
    return {"cfg": {"model": {**OWN, **config}}, "model": nn.Linear(2, 3).state_dict() | (model or {})}


def test_a_checkpoint_of_another_architecture_is_rejected():
    with pytest.raises(AlmaError, match=r"a\.pt: expected architecture alma_switch_lm_tiny, found alma_umix"):
        check_architecture(checkpoint_of(), "a.pt", {"_name": "alma_switch_lm_tiny"})
    with pytest.raises(AlmaError, match=r"found alma_ensemble; start from another checkpoint$"):
        check_architecture(checkpoint_of(_name="alma_ensemble"), "a.pt", {"_name": "alma_switch_lm_tiny"})


@pytest.mark.parametrize(
    ("arch", "trained", "given", "named"),
    [
        ("alma_switch_lm", {"decoder_sinusoidal_pos": True}, {"decoder_sinusoidal_pos": False}, "--decoder-sinusoidal"),
        ("alma_umix", {"num_members": 2}, {"num_members": 3}, "give --num-members 2"),
        ("alma_vgg", {"last_pool": "max"}, {"last_pool": "mean"}, "--last-pool 'max'"),
        (
            "alma_umix",
            {"member_arch": "alma_vgg", "member_options": "--last-pool max"},
            {"member_arch": "alma_vgg", "member_options": ""},
            "--last-pool 'max' in --member-options",
        ),
    ],
)
def test_a_checkpoint_with_another_option_of_the_same_sizes_is_rejected(arch, trained, given, named):
    checkpoint = checkpoint_of(**trained, _name=arch)
    with pytest.raises(AlmaError, match=re.escape(named)) as error:
        check_architecture(checkpoint, "a.pt", {**OWN, **given, "_name": arch})
    assert "\n" not in str(error.value)
    check_architecture(checkpoint, "a.pt", {**OWN, **trained, "_name": arch})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"bias": torch.zeros(4)}, r"1 tensor\(s\) with a wrong shape \(first: bias, expected \(3,\), found \(4,\)\)"),
        ({"gate": torch.zeros(1)}, r"1 unexpected tensor\(s\) \(first: gate\)"),
    ],
)
def test_weights_of_other_shapes_are_rejected(model, named):
    with pytest.raises(AlmaError, match=named) as error:
        refuse_other_shapes(checkpoint_of(model)["model"], nn.Linear(2, 3), "a.pt", "give another file")
    assert "\n" not in str(error.value)


ARGUMENTS = ["--megabatch", "0", "--num-experts", "2", "--save-interval-updates", "3"]
ALTERED = {
    "fewer parameters": (("last_optimizer_state", "param_groups", 0, "params"), [0, 1]),
    "options of another optimizer": (("last_optimizer_state", "param_groups", 0), {"params": []}),
    "another optimizer": (("optimizer_history", 0, "optimizer_name"), "FairseqSGD"),
    "meter": (("extra_state", "metrics", "train"), [(0, "loss", "AverageMeter", {"val": "x"})]),
    "batch": (("extra_state", "train_iterator", "iterations_in_epoch"), 10**9),
}


@pytest.fixture(scope="module")
def begun(trained, tmp_path_factory):
    """A stream and the checkpoint of an unfinished training."""
    folder = tmp_path_factory.mktemp("resumed")
    return trained.stream, train_model(trained.stream, folder, *ARGUMENTS, "--max-update", "3")


@pytest.mark.parametrize("kind", ALTERED)
def test_an_unsuitable_training_state_is_rejected_in_one_line(kind, begun, tmp_path):
    stream, good = begun
    content = torch.load(good, weights_only=False)
    torch.save(with_value(content, *ALTERED[kind]), tmp_path / "checkpoint_last.pt")
    with pytest.raises(AlmaError) as error:
        train_model(stream, tmp_path, *ARGUMENTS, "--max-update", "5")
    assert str(tmp_path) in str(error.value)
    assert re.search("; .*give ", str(error.value)) and "\n" not in str(error.value)


def test_reset_options_start_a_training_with_another_optimizer(begun, tmp_path):
    stream, good = begun
    arguments = ["--restore-file", str(good), "--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader"]
    arguments += ["--reset-meters", "--optimizer", "sgd", "--max-update", "2"]
    last = train_model(stream, tmp_path, *ARGUMENTS, *arguments)
    assert torch.load(last, weights_only=False)["optimizer_history"][-1]["optimizer_name"] == "SGD"
