"""fairseq's commands load what fits, and end in one line where a model or the state of a training does not."""

import re

import fairseq.models  # noqa: F401  registers the architectures
import pytest
import torch
from torch import nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.loading import check_architecture, check_weights
from tests.test_any_record import with_value
from tests.text.stock_commands import train_model

OWN = {"_name": "alma_umix", "member_arch": "alma_mlp", "member_options": ""}


def checkpoint_of(model=None, **config):
    return {"cfg": {"model": {**OWN, **config}}, "model": nn.Linear(2, 3).state_dict() | (model or {})}


def test_a_start_of_the_same_kind_and_sizes_passes():
    check_architecture(checkpoint_of(num_members=2), "a.pt", {**OWN, "num_members": 2})
    check_weights(checkpoint_of(), "a.pt", nn.Linear(2, 3))


def test_a_start_from_another_kind_of_model_is_refused():
    with pytest.raises(AlmaError, match=r"a\.pt: holds an alma_umix, the command builds an alma_switch_lm_tiny"):
        check_architecture(checkpoint_of(), "a.pt", {"_name": "alma_switch_lm_tiny"})


def test_a_start_with_another_number_of_members_is_refused():
    with pytest.raises(AlmaError, match=r"a\.pt: .* give --num-members 2"):
        check_architecture(checkpoint_of(num_members=2), "a.pt", {**OWN, "num_members": 3})


@pytest.mark.parametrize(
    ("arch", "trained", "given", "named"),
    [
        ("alma_switch_lm", {"decoder_sinusoidal_pos": True}, {"decoder_sinusoidal_pos": False}, "--decoder-sinusoidal"),
        ("alma_vgg", {"last_pool": "max"}, {"last_pool": "mean"}, "--last-pool 'max'"),
        (
            "alma_umix",
            {"member_arch": "alma_vgg", "member_options": "--last-pool max"},
            {"member_arch": "alma_vgg", "member_options": ""},
            "--last-pool 'max' in --member-options",
        ),
    ],
)
def test_a_start_of_the_same_sizes_that_computes_something_else_is_refused(arch, trained, given, named):
    checkpoint = checkpoint_of(**trained, _name=arch)
    with pytest.raises(AlmaError, match=re.escape(named)) as error:
        check_architecture(checkpoint, "a.pt", {**OWN, **given, "_name": arch})
    assert "\n" not in str(error.value)
    check_architecture(checkpoint, "a.pt", {**OWN, **trained, "_name": arch})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"bias": torch.zeros(4)}, r"misshapen 1 tensor\(s\), bias the first \(\(4,\), not \(3,\)\)"),
        ({"gate": torch.zeros(1)}, r"beyond its configuration 1 tensor\(s\), gate"),
    ],
)
def test_weights_of_other_sizes_are_named_in_one_line(model, named):
    with pytest.raises(AlmaError, match=named) as error:
        check_weights(checkpoint_of(model), "a.pt", nn.Linear(2, 3))
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
    """A stream, and a checkpoint of a training that is not over."""
    folder = tmp_path_factory.mktemp("resumed")
    return trained.stream, train_model(trained.stream, folder, *ARGUMENTS, "--max-update", "3")


@pytest.mark.parametrize("kind", ALTERED)
def test_a_state_that_does_not_fit_ends_fairseq_train_in_one_line(kind, begun, tmp_path):
    stream, good = begun
    content = torch.load(good, weights_only=False)
    torch.save(with_value(content, *ALTERED[kind]), tmp_path / "checkpoint_last.pt")
    with pytest.raises(AlmaError) as error:
        train_model(stream, tmp_path, *ARGUMENTS, "--max-update", "5")
    assert str(tmp_path) in str(error.value)
    assert "; give " in str(error.value) and "\n" not in str(error.value)


def test_a_training_with_a_new_optimizer_begins_with_the_weights_alone(begun, tmp_path):
    stream, good = begun
    arguments = ["--restore-file", str(good), "--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader"]
    arguments += ["--reset-meters", "--optimizer", "sgd", "--max-update", "2"]
    last = train_model(stream, tmp_path, *ARGUMENTS, *arguments)
    assert torch.load(last, weights_only=False)["optimizer_history"][-1]["optimizer_name"] == "SGD"


def test_a_checkpoint_does_not_grow_with_the_trainings_that_it_comes_from(trained, tmp_path):
    last, lengths = trained.checkpoint, []
    for stage in range(2):
        how = ["--megabatch", "0", "--max-update", "2", "--finetune-from-model", str(last)]
        last = train_model(trained.stream, tmp_path / str(stage), *how)
        lengths.append(len(torch.load(last, weights_only=True)["optimizer_history"]))
    assert lengths == [2, 2]
