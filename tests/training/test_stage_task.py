"""Stock commands print the loss of the complete split with any number of processes."""

import pytest
from fairseq import options
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import eval_lm, validate

from fairseq_alma.training.fairseq_options import configuration_of
from tests.forked import group_options, together
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluation_config


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
