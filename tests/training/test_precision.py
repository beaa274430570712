"""bf16 autocast, and the rejection of fairseq's half precision."""

import pytest
import torch
from fairseq import options, tasks
from fairseq_cli import train, validate

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.stage_task import configuration_of
from tests.text.stock_commands import evaluate, train_model, training_config

needs_bf16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a processor without bf16")
STAGE = ("--megabatch", "1", "--wait", "2")


@pytest.mark.parametrize(
    "option", ["--bf16", "--memory-efficient-bf16", "--fp16", "--memory-efficient-fp16", "--amp", "--tpu"]
)
def test_training_rejects_half_precision_of_fairseq_and_names_autocast(trained, option):
    with pytest.raises(AlmaError, match=rf"^{option}: this option .*; give --autocast bf16"):
        training_config(trained.stream, *STAGE, option)


def test_evaluation_accepts_fp16_but_not_bf16(trained):
    command = [str(trained.stream), "--task", "alma_lm", "--path", str(trained.checkpoint)]
    assert options.parse_args_and_arch(options.get_eval_lm_parser(), [*command, "--fp16"]).fp16
    with pytest.raises(AlmaError, match=r"^--bf16: .*--autocast bf16"):
        options.parse_args_and_arch(options.get_eval_lm_parser(), [*command, "--bf16"])


@needs_bf16
def test_weights_and_moments_are_fp32(trained, tmp_path):
    now = torch.load(train_model(trained.stream, tmp_path, *STAGE, "--autocast", "bf16", "--max-update", "2"))
    moments = [each for state in now["last_optimizer_state"]["state"].values() for each in state.values()]
    for tensor in (*now["model"].values(), *filter(torch.is_tensor, moments)):
        assert tensor.dtype == torch.float32


@needs_bf16
def test_evaluation_in_bf16_differs_by_rounding(trained):
    figures = (evaluate(trained.stream, trained.checkpoint, "--autocast", to) for to in ("none", "bf16"))
    exact, half = (float(each["loss"]) for each in figures)
    assert half != exact == pytest.approx(half, rel=0.01)


def test_fairseq_validate_does_not_inherit_autocast_from_training(trained, tmp_path, monkeypatch):
    checkpoint = torch.load(trained.checkpoint)
    checkpoint["cfg"]["task"]["autocast"] = "bf16"
    torch.save(checkpoint, tmp_path / "m.pt")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    words = [str(trained.stream), "--task", "alma_lm", "--path", str(tmp_path / "m.pt"), "--valid-subset", "test"]
    words += ["--batch-size", "4", "--cpu", "--num-workers", "0"]
    args, given = (
        options.parse_args_and_arch(options.get_validation_parser(), words, suppress_defaults=each)
        for each in (False, True)
    )
    validate.main(configuration_of(args), override_args=given)  # raises an error if it computes in bf16


def test_a_device_without_bf16_is_rejected(trained, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(AlmaError, match=r"^--autocast bf16: this processor does not support bf16"):
        tasks.setup_task(training_config(trained.stream, "--autocast", "bf16").task)


@pytest.mark.gpu
def test_training_on_a_gpu_resumes_bit_for_bit_and_reaches_the_loss_of_a_cpu(trained, tmp_path):
    def train_on_gpu(folder, *words):
        words = [*STAGE, "--autocast", "bf16", "--save-dir", str(folder), *words]
        train.main(training_config(trained.stream, *words, device=()))
        return torch.load(folder / "checkpoint_last.pt", map_location="cpu")["model"]

    through = train_on_gpu(tmp_path / "through")
    train_on_gpu(tmp_path / "cut", "--max-update", "9")
    resumed = train_on_gpu(tmp_path / "cut")
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    assert {tensor.dtype for tensor in through.values()} == {torch.float32}
    paths = (tmp_path / "through/checkpoint_last.pt", trained.checkpoint)
    losses = [float(evaluate(trained.stream, path)["loss"]) for path in paths]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
