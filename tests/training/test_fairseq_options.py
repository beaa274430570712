"""Ranges of this package's options in fairseq's commands and configurations."""

from types import SimpleNamespace

import pytest
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.fairseq_options import check_options, configuration_of
from tests.text.stock_commands import training_options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-experts", "0"], "--num-experts: expected a number of at least 1, found 0"),
        (["--dropout", "nan"], "--dropout: expected a number, found nan"),
        (["--new-first", "2"], "--new-first: expected a number of at most 1, found 2"),
        (["--optimizer", "muon", "--muon-momentum", "1"], "--muon-momentum: expected a number below 1, found 1"),
        (["--optimizer", "muon", "--weight-decay", "-1"], "--weight-decay: expected a number of at least 0, found -1"),
        (["--optimizer", "fused_adam", "--adam-eps", "-1"], "--adam-eps: expected a number of at least 0, found -1"),
    ],
)
def test_a_stock_command_rejects_a_number_out_of_range(trained, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        training_options(trained.stream, *words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("make", [OmegaConf.create, lambda values: SimpleNamespace(**values)])
def test_check_options_rejects_a_number_out_of_range_and_accepts_defaults_and_references(make):
    check_options(make({"capacity_factor": 0.0, "new_first": 0.0, "num_experts": None, "data": "${task.data}"}))
    with pytest.raises(AlmaError, match=r"--capacity-factor -1.0: expected a number of at least 0"):
        check_options(make({"capacity_factor": -1.0}))


@pytest.mark.parametrize(
    "words",
    [
        "--arch alma_transformer_lm --num-experts 4 --optimizer adam --adam-betas (0.9,0.99) --lr 0.1,0.2 --replay "
        "--autocast bf16 --ema-half-life 1/16 --continue-as stage",
        "--arch alma_transformer_lm --optimizer sgd --lr-scheduler cosine --wandb-project x=y --update-freq 2,4",
        "--arch lstm_lm --optimizer adam --lr 0.1",  # lstm_lm declares no dataclass
    ],
)
def test_a_configuration_equals_that_of_fairseq(trained, words):
    options = training_options(trained.stream, *words.split(), "--save-dir", "a folder", shape=())
    ours, expected = configuration_of(options), convert_namespace_to_omegaconf(options)
    if "sgd" in words:  # has no dataclass
        expected.optimizer = vars(expected.optimizer)
    assert ours == expected and str(ours) == str(expected)
    assert OmegaConf.is_struct(ours)
