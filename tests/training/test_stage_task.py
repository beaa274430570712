"""The stock commands print the loss of the whole split on any number of processes."""

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import eval_lm, train, validate

from fairseq_alma.cli.ensemble import main as join
from tests.forked import group_options, together
from tests.images.image_streams import make_stream
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluation_config, train_model


def evaluate_rank(rank, num_processes, folder, stream, checkpoint, *arguments):
    results = []
    cfg = evaluation_config(stream, checkpoint, *arguments, *group_options(num_processes, rank, folder))
    distributed_utils.call_main(cfg, lambda cfg, **kwargs: results.append(eval_lm.main(cfg)))
    return float(results[0]["loss"])


def losses(folder, num_processes, stream, checkpoint, *arguments):
    return together(num_processes, evaluate_rank, num_processes, folder, stream, checkpoint, *arguments)[0]


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [pytest.param([], (2, 3), marks=pytest.mark.slow), (["--batch-size", "3", "--context-window", "5"], (3,))],
)
def test_fairseq_eval_lm_finds_the_same_to_the_last_digit_on_several_processes(trained, tmp_path, arguments, numbers):
    (alone,) = losses(tmp_path, 1, trained.stream, trained.checkpoint, *arguments)
    for number in numbers:
        assert losses(tmp_path, number, trained.stream, trained.checkpoint, *arguments) == [alone] * number


def test_so_does_an_ensemble(trained, tmp_path):
    other = train_model(trained.stream, tmp_path / "other", "--megabatch", "0", "--seed", "2", "--max-update", "3")
    ensemble = tmp_path / "ensemble.pt"
    join([str(trained.checkpoint), str(other), "--out", str(ensemble)])
    (alone,) = losses(tmp_path, 1, trained.stream, ensemble)
    assert losses(tmp_path, 2, trained.stream, ensemble) == [alone] * 2


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
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), validate.main, override_args=given)
    finally:
        validate.progress_bar.SimpleProgressBar.print = print_stats
    return lines


def check_validation(tmp_path, command, number):
    command = [*command, "--no-progress-bar", "--num-workers", "0", "--cpu"]
    ((alone,),), _ = together(1, validate_rank, command, 1, tmp_path)
    for lines in together(number, validate_rank, command, number, tmp_path)[0]:
        assert lines == [pytest.approx(alone, rel=1e-5)]
    return alone


def test_fairseq_validate_shares_the_batches_and_adds_up_all_of_them(trained, tmp_path):
    # 25 sequences in batches of 1: more logs than fairseq gathers, and no multiple of three processes
    command = [str(trained.stream), "--task", "alma_lm", "--tokens-per-sample", str(TOKENS_PER_SAMPLE)]
    command += ["--path", str(trained.checkpoint), "--valid-subset", "test", "--batch-size", "1"]
    alone = check_validation(tmp_path, command, 3)
    assert {"nll_loss", "balance_loss", "switch0_expert03"} <= set(alone)


def test_fairseq_validate_does_so_with_images(tmp_path):
    stream = make_stream(tmp_path / "S", num_megabatches=2)
    task = [str(stream), "--task", "alma_image_classification", "--cpu", "--num-workers", "0"]
    words = [*task, "--megabatch", "0", "--criterion", "alma_image_cross_entropy", "--arch", "alma_mlp", "--width", "4"]
    words += ["--optimizer", "adadelta", "--lr", "1.0", "--max-update", "3", "--batch-size", "32"]
    words += ["--log-format", "none", "--disable-validation", "--save-dir", str(tmp_path / "model")]
    train.main(convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words)))
    command = [*task, "--path", str(tmp_path / "model/checkpoint_last.pt"), "--valid-subset", "test"]
    assert "error" in check_validation(tmp_path, [*command, "--batch-size", "15"], 3)  # 7 batches of 100 images
