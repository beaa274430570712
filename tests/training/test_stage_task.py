"""Stock commands check our options, and print the loss of the complete split with any number of processes."""

from types import SimpleNamespace

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import eval_lm, validate
from omegaconf import OmegaConf

from fairseq_alma.errors import AlmaError
from fairseq_alma.training.stage_task import check_options, configuration_of
from tests.forked import group_options, together
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluation_config, training_options


def evaluate_rank(rank, num_processes, folder, stream, checkpoint, *arguments):
    results = []
    cfg = evaluation_config(stream, checkpoint, *arguments, *group_options(num_processes, rank, folder))
    distributed_utils.call_main(cfg, lambda cfg, **kwargs: results.append(eval_lm.main(cfg)))
    return float(results[0]["loss"])


def losses(folder, num_processes, stream, checkpoint, *arguments):
    return together(num_processes, evaluate_rank, num_processes, folder, stream, checkpoint, *arguments)[0]


def test_fairseq_eval_lm_prints_identical_losses_with_several_processes(trained, tmp_path):
    tested = (trained.stream, trained.checkpoint, "--batch-size", "3", "--context-window", "5")
    (alone,) = losses(tmp_path, 1, *tested)
    assert losses(tmp_path, 3, *tested) == [alone] * 3


def validate_rank(rank, command, num_processes, folder):
    words = [*command, *group_options(num_processes, rank, folder)]
    args = options.parse_args_and_arch(options.get_validation_parser(), words)
    given = options.parse_args_and_arch(options.get_validation_parser(), words, suppress_defaults=True)
    lines = []
    print_stats = validate.progress_bar.SimpleProgressBar.print
    validate.progress_bar.SimpleProgressBar.print = lambda self, stats, tag=None, step=None: lines.append(
        {key: value for key, value in stats.items() if key not in ("wps", "wall")}
    )
    try:
        distributed_utils.call_main(configuration_of(args), validate.main, override_args=given)
    finally:
        validate.progress_bar.SimpleProgressBar.print = print_stats
    return lines


@pytest.mark.slow
def test_fairseq_validate_sums_the_batches_of_all_processes(trained, tmp_path):
    # 25 sequences in batches of 1: logs above fairseq's size limit, and processes with different numbers of batches
    command = [str(trained.stream), "--task", "alma_lm", "--tokens-per-sample", str(TOKENS_PER_SAMPLE)]
    command += ["--path", str(trained.checkpoint), "--valid-subset", "test", "--batch-size", "1"]
    command += ["--no-progress-bar", "--num-workers", "0", "--cpu"]
    ((alone,),), _ = together(1, validate_rank, command, 1, tmp_path)
    for lines in together(3, validate_rank, command, 3, tmp_path)[0]:
        assert lines == [pytest.approx(alone, rel=1e-5)]
    assert {"nll_loss", "balance_loss", "switch0_expert03"} <= set(alone)


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
