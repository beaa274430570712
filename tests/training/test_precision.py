"""bf16 through autocast, on a GPU as on a CPU, and what fairseq has instead."""

import copy

import pytest
import torch
from fairseq import options, tasks, utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq_cli import train

from fairseq_alma.errors import AlmaError
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluate, train_model, training_config

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bf16 arithmetic"
)
STAGE = ("--megabatch", "1", "--wait", "2")


@pytest.mark.parametrize(
    "option", ["--bf16", "--memory-efficient-bf16", "--fp16", "--memory-efficient-fp16", "--amp", "--tpu"]
)
def test_fairseq_s_own_half_precisions_are_refused_in_training_with_the_name_of_ours(trained, option):
    with pytest.raises(AlmaError, match=rf"^{option}: fairseq's own .*; give --autocast bf16"):
        training_config(trained.stream, *STAGE, option)


def test_a_test_may_halve_the_weights_but_not_look_for_a_tpu(trained):
    command = [str(trained.stream), "--task", "alma_lm", "--path", str(trained.checkpoint)]
    assert options.parse_args_and_arch(options.get_eval_lm_parser(), [*command, "--fp16"]).fp16
    with pytest.raises(AlmaError, match=r"^--bf16: .*--autocast bf16"):
        options.parse_args_and_arch(options.get_eval_lm_parser(), [*command, "--bf16"])


@needs_bf16
def test_weights_and_moments_are_fp32(trained, tmp_path):
    now = torch.load(train_model(trained.stream, tmp_path, *STAGE, "--autocast", "bf16"))
    moments = [each for state in now["last_optimizer_state"]["state"].values() for each in state.values()]
    for tensor in (*now["model"].values(), *filter(torch.is_tensor, moments)):
        assert tensor.dtype == torch.float32
    plain = torch.load(trained.checkpoint)["model"]
    assert not torch.equal(plain["decoder.embed_tokens.weight"], now["model"]["decoder.embed_tokens.weight"])


@needs_bf16
@pytest.mark.slow
def test_a_run_that_was_cut_off_resumes_to_the_last_bit(trained, tmp_path):
    words = [*STAGE, "--autocast", "bf16"]
    through = train_model(trained.stream, tmp_path / "through", *words)
    train_model(trained.stream, tmp_path / "cut", *words, "--max-update", "9")
    resumed = train_model(trained.stream, tmp_path / "cut", *words)
    one, other = torch.load(through)["model"], torch.load(resumed)["model"]
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_bf16
def test_a_test_in_bf16_differs_in_the_last_digits_alone(trained):
    exact, half = (
        float(evaluate(trained.stream, trained.checkpoint, "--autocast", to)["loss"]) for to in ("none", "bf16")
    )
    assert exact != half
    assert exact == pytest.approx(half, rel=0.01)


def test_a_device_without_bf16_is_refused(trained, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(AlmaError, match=r"^--autocast bf16: this processor has no bf16"):
        tasks.setup_task(training_config(trained.stream, "--autocast", "bf16").task)


@pytest.fixture
def faked_gpu(monkeypatch):
    """A GPU that fairseq's trainer believes in; its tensors stay where they are."""
    move = torch.nn.Module.to

    def to(module, *args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if torch.device("cuda") != value}
        return move(module, *args, **kwargs) if args or kwargs else module

    for name, value in {
        "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "is_bf16_supported": True,
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "empty_cache": None, "manual_seed": None,
        "get_rng_state": None, "set_rng_state": None, "current_device": "cpu",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=value, **kwargs: answer)
    monkeypatch.setattr(torch.nn.Module, "to", to)
    monkeypatch.setattr(utils, "move_to_cuda", lambda sample, device=None: sample)
    environment = type(
        "CudaEnvironment", (), {"total_memory_in_GB": 80, "pretty_print_cuda_env_list": lambda *args: None}
    )
    monkeypatch.setattr(utils, "CudaEnvironment", environment)


@needs_bf16
def test_the_trainer_of_a_gpu_computes_in_bf16_with_the_plain_optimizer_on_fp32_weights(trained, faked_gpu):
    cfg = training_config(trained.stream, *STAGE, "--autocast", "bf16", device=())
    assert not (cfg.common.tpu or cfg.common.bf16 or cfg.common.fp16 or cfg.common.amp)
    assert cfg.distributed_training.distributed_backend == "nccl"
    assert cfg.distributed_training.ddp_backend == "pytorch_ddp"
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    assert trainer.cuda and not trainer.tpu
    precisions = set()
    layer = trainer.model.decoder.layers[0].fc1
    layer.register_forward_hook(lambda module, args, output: precisions.add(output.dtype))
    before = copy.deepcopy(trainer.model.state_dict())
    batch = next(task.get_batch_iterator(task.dataset("train"), max_sentences=4).next_epoch_itr(shuffle=False))
    assert batch["net_input"]["src_tokens"].size(1) == TOKENS_PER_SAMPLE
    with metrics.aggregate("train_inner"):
        trainer.train_step([batch])
    assert precisions == {torch.bfloat16}
    after = trainer.model.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert type(trainer.optimizer).__name__ == "FairseqAdam"


@pytest.mark.gpu
def test_on_a_gpu_a_run_resumes_to_the_last_bit_and_learns_what_a_processor_does(trained, tmp_path):
    def train_on_gpu(folder, *words):
        words = [*STAGE, "--autocast", "bf16", "--save-dir", str(folder), *words]
        train.main(training_config(trained.stream, *words, device=()))
        return torch.load(folder / "checkpoint_last.pt", map_location="cpu")["model"]

    through = train_on_gpu(tmp_path / "through")
    train_on_gpu(tmp_path / "cut", "--max-update", "9")
    resumed = train_on_gpu(tmp_path / "cut")
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    assert {tensor.dtype for tensor in through.values()} == {torch.float32}
    losses = [
        float(evaluate(trained.stream, path)["loss"])
        for path in (tmp_path / "through/checkpoint_last.pt", trained.checkpoint)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
