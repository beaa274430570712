import re

import pytest

from fairseq_alma.cli.stream import build_parser
from fairseq_alma.text.train_options import OWNED, TrainOptions

BASE = ["--arch", "alma_switch_lm_tiny", "--max-update", "10"]


def test_options_are_grouped_with_their_values():
    words = ["-a", "x", "--max-epoch", "3", "--max-epoch", "4", "--adam-betas", "(0.9, 0.98)", "--cpu", "--lr=0.1"]
    options = TrainOptions([*words, "--stop-at", "-1", "--x", "-.5"])
    assert options.as_dict() == {
        "--arch": "x", "--max-epoch": "4", "--adam-betas": "(0.9, 0.98)", "--cpu": "", "--lr": "0.1", "--stop-at": "-1",
        "--x": "-.5",
    }  # fmt: skip
    assert (options.max_update, options.max_epoch) == (None, 4)


@pytest.mark.parametrize("name", [*sorted(OWNED), "--save-d", "--mega", "--finetune-from", "--save-interval=5"])
def test_options_set_by_alma_stream_are_refused_also_when_abbreviated(name):
    with pytest.raises(ValueError, match="is not allowed after --"):
        TrainOptions([*BASE, name, "x"])


def test_a_refusal_names_options_that_stand_before_the_dashes():
    advised = [each.partition("before the --") for each in {*OWNED.values()}]
    named = {name for advice, is_before, _ in advised if is_before for name in re.findall(r"--[a-z-]+", advice)}
    assert "--run" in named <= build_parser()._option_string_actions.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "x"], "--max-update: not given"),
        (["--arch", "x", "--max-update", "many"], "--max-update many .*positive integer"),
        (["--arch", "x", "--max-update", "0"], "--max-update 0 .*positive integer"),
        (["--arch", "x", "--max-epoch"], "--max-epoch .*positive integer"),
        ([*BASE, "--num-experts", "0"], "--num-experts 0: expected a number of at least 1"),
        ([*BASE, "--autocast", "fp16"], "--autocast fp16: choose from bf16"),
        ([*BASE, "--", "--lr", "1"], "-- is not allowed after --: give -- once"),
        ([*BASE, "--balance-loss-weight", "0.5"], "--balance-loss-weight after --: requires --criterion"),
        ([*BASE, "--batch-s", "8"], "--batch-s after --: abbreviation of --batch-size; give the full name"),
        (["stream", "--arch", "x"], "'stream' after --: expected an option of fairseq-train"),
    ],
)
def test_invalid_options_are_refused_before_anything_runs(words, message):
    with pytest.raises(ValueError, match=message):
        TrainOptions(words)


def test_the_evaluation_gets_only_its_options_and_prefers_the_batch_size_of_validation():
    words = ["--cpu", "--lr", "0.1", "--batch-size", "8", "--tokens-per-sample", "64", "--autocast", "bf16"]
    expected = [("--cpu",), ("--tokens-per-sample", "64"), ("--batch-size", "8")]
    assert TrainOptions([*BASE, *words]).for_evaluation() == expected
    words = ["--batch-size", "8", "--max-sentences-valid", "2", "--max-tokens", "100"]
    assert TrainOptions([*BASE, *words]).for_evaluation() == [("--batch-size", "2"), ("--max-tokens", "100")]


@pytest.mark.parametrize(("given", "num_procs", "each"), [("4", 2, "2"), ("8,4", 4, "2,1"), ("3", 3, "1")])
def test_processes_share_the_batches_of_an_update(given, num_procs, each):
    options = TrainOptions([*BASE, "--update-freq", given])
    assert options.shared(num_procs).as_dict() == {**options.as_dict(), "--update-freq": each}


@pytest.mark.parametrize("given", [[], ["2,1"], ["x"]])
def test_batches_that_are_no_multiple_of_the_processes_are_refused(given):
    message = "--num-procs 2: must divide the number of batches per update, found --update-freq "
    with pytest.raises(ValueError, match=f"{message}{(*given, '1')[0]} .after --"):
        TrainOptions([*BASE, *(["--update-freq", *given] if given else [])]).shared(2)


def test_lengthened_options_have_more_updates_and_the_same_warm_up():
    given = TrainOptions([*BASE, "--total-num-update", "12", "--warmup-updates", "3", "--lr", "1"])
    longer = given.lengthened(3)
    assert longer.as_dict() == given.as_dict() | {"--max-update": "30", "--total-num-update": "36"}
    assert longer.max_update == 30
