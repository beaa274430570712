import re
from types import SimpleNamespace

import fairseq.models  # noqa: F401  registers the architectures
import pytest
import torch
from torch import nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.loading import check_start, check_weights

STREAM = SimpleNamespace(dictionary_sha256="d" * 64, root="S")
OWN = {"_name": "alma_umix", "member_arch": "alma_mlp", "member_options": ""}


def checkpoint_of(model=None, **config):
    return {"cfg": {"model": {**OWN, **config}}, "model": nn.Linear(2, 3).state_dict() | (model or {})}


def test_a_start_of_the_same_kind_and_sizes_passes():
    check_start(checkpoint_of(num_members=2), "a.pt", {**OWN, "num_members": 2}, STREAM)
    check_weights(checkpoint_of(), "a.pt", nn.Linear(2, 3))


def test_a_start_from_another_kind_of_model_is_refused():
    with pytest.raises(AlmaError, match=r"a\.pt: holds an alma_umix, the command builds an alma_switch_lm_tiny"):
        check_start(checkpoint_of(), "a.pt", {"_name": "alma_switch_lm_tiny"}, STREAM)


def test_a_start_with_another_number_of_members_is_refused():
    with pytest.raises(AlmaError, match=r"a\.pt: .* give --num-members 2"):
        check_start(checkpoint_of(num_members=2), "a.pt", {**OWN, "num_members": 3}, STREAM)


@pytest.mark.parametrize(
    ("arch", "trained", "given", "named"),
    [
        ("alma_switch_lm", {"decoder_sinusoidal_pos": True}, {"decoder_sinusoidal_pos": False}, "--decoder-sinusoidal"),
        ("alma_vgg", {"last_pool": "max"}, {"last_pool": "mean"}, "--last-pool 'max'"),
        ("alma_firefly_vgg", {"initial_weights": "default"}, {"initial_weights": "he"}, "--initial-weights 'default'"),
        ("alma_moe_mlp", {"gate": "hard"}, {"gate": "soft"}, "--gate 'hard'"),
        ("alma_umix", {"joint_logits": "sum"}, {"joint_logits": "mean"}, "--joint-logits 'sum'"),
        (
            "alma_umix",
            {"member_arch": "alma_switch_lm_tiny", "member_options": "--no-scale-embedding"},
            {"member_arch": "alma_switch_lm_tiny", "member_options": "--dropout 0.3"},
            "--no-scale-embedding in --member-options",
        ),
    ],
)
def test_a_start_of_the_same_sizes_that_computes_something_else_is_refused(arch, trained, given, named):
    checkpoint = checkpoint_of(**trained, _name=arch)
    with pytest.raises(AlmaError, match=re.escape(named)) as error:
        check_start(checkpoint, "a.pt", {**OWN, **given, "_name": arch}, STREAM)
    assert "\n" not in str(error.value)
    check_start(checkpoint, "a.pt", {**OWN, **trained, "_name": arch}, STREAM)


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
