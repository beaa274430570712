"""Defaults of a run on text, which given options replace, and checks of the options after ``--``."""

import re
from collections import defaultdict

import pytest

from fairseq_alma.cli.stream import build_parser
from fairseq_alma.options import group_words
from fairseq_alma.runs.study import read_size
from fairseq_alma.text.train_options import (
    OWNED,
    TABLE,
    Context,
    TrainOptions,
    complete,
    complete_sizes,
    model_of,
    num_params,
    tokens_per_update,
    usual_heads,
)

OWN = ["--arch", "alma_switch_lm_tiny", "--max-update", "5", "--batch-size", "4"]
COMPLETE = [*OWN, "--criterion", "cross_entropy", "--optimizer", "adam", "--lr", "0.002"]
TOKENS = [2_000_000, 1_000_000]
BASE = ["--arch", "alma_switch_lm_tiny", "--max-update", "10"]


def made(words=(), tokens=TOKENS, before=None, vocab_size=996, **given):
    return complete([*words], Context(**given), tokens, vocab_size, before)


def options(found):
    return {name: " ".join(values) for name, values in group_words(found.words)}


def test_defaults_make_a_complete_command():
    found = made()
    given = options(found)
    assert given["--arch"] == "alma_transformer_lm" and given["--optimizer"] == "muon"
    assert given["--criterion"] == "alma_switch_cross_entropy" and 0 < float(given["--lr"]) < 0.05
    assert TrainOptions(found.words).max_update == found.lengths[0]
    assert found.features == {"ema_half_life": "1/8", "carry_optimizer": True}
    assert found.record["chosen"] == found.chosen and len(found.lines) == 4


def test_stages_are_as_long_as_their_text():
    long, short = (found := made()).lengths
    assert abs(long - 2 * short) <= 1 and options(found)["--max-update"] == str(long)
    assert [options(made(passes=passes))["--weight-decay"] for passes in (1, 2, 5)] == ["0", "0.01", "0.1"]
    twice = made(passes=2)
    assert abs(sum(twice.lengths) * tokens_per_update(options(twice)) / 6e6 - 1) < 0.01
    assert len({made(["--update-freq", "6"], num_procs=number).per_update for number in (1, 2, 3)}) == 1


@pytest.mark.parametrize(
    "size", ["--batch-size 2 --max-tokens 512", "--max-tokens 256", "--batch-size 9 --max-tokens 300"]
)
def test_a_pass_reads_all_tokens_with_any_limits_of_a_batch(size):
    assert sum(made([*size.split(), "--update-freq", "2,2"]).lengths) == pytest.approx(sum(TOKENS) / 512, rel=0.01)


@pytest.mark.parametrize(
    "word", ["--lr 0.02", "--num-experts 8", "--decoder-layers 3", "--optimizer adam", "--batch-size 5"]
)
def test_given_options_take_precedence(word):
    name, value = word.split()
    found = made([name, value])
    assert options(found)[name] == value and name not in found.chosen
    assert [each for each, _ in group_words(found.words)].count(name) == 1


def test_a_complete_command_stays_unchanged():
    found = made(COMPLETE)
    assert found.words == COMPLETE and not found.chosen and not found.features and found.record is None
    assert made(COMPLETE, tokens=None).words == COMPLETE


@pytest.mark.parametrize("left_out", ["--criterion", "--optimizer", "--lr"])
def test_other_architectures_get_only_options_without_a_useful_default(left_out):
    place = COMPLETE.index(left_out)
    found = made(COMPLETE[:place] + COMPLETE[place + 2 :])
    assert left_out in found.chosen and not found.features and float(options(found)["--lr"]) <= 0.01
    assert not {"--decoder-layers", "--dropout", "--tokens-per-sample"} & found.chosen.keys()


def test_more_text_makes_a_larger_model_and_batch():
    small, large = made(tokens=[10**6]), made(tokens=[10**9])
    assert int(options(large)["--decoder-embed-dim"]) > int(options(small)["--decoder-embed-dim"])
    assert tokens_per_update(options(large)) > tokens_per_update(options(small))
    assert [row.width for row in TABLE] == sorted({row.width for row in TABLE})


@pytest.mark.parametrize("size", [200_000, 1_000_000, 30_000_000])
def test_a_size_is_met_within_a_third(size):
    given = options(made(size=size))
    width, layers = (int(given[f"--decoder-{name}"]) for name in ("embed-dim", "layers"))
    assert 0.67 < num_params(width, layers, 996) / size < 1.5
    for larger in (["--num-experts", "8"], ["--decoder-layers", "12"]):
        for found in (made(larger, size=size), made(size=size, sizes=dict([larger]))):
            assert int(options(found)["--decoder-embed-dim"]) < width
    assert tokens_per_update(given) == tokens_per_update(options(made()))


def test_every_size_gives_a_model_whose_heads_divide_its_width():
    for size in (round(1.01**power) for power in range(1200, 2200)):  # 153 k to 3.2 G parameters
        model = model_of(size, 996, {})
        options = defaultdict(lambda: None, decoder_embed_dim=model.width, decoder_layers=model.layers)
        complete_sizes(options, "alma_transformer_lm")  # raises an error where heads do not divide the width
        assert options["decoder_attention_heads"] == usual_heads(model.width)


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ({"size": 10**11}, [], "--size 100,000,000,000: expected .* parameters"),
        ({"size": 10}, [], "--size 10: "),
        ({"size": 10**6}, OWN, "--size: not allowed with --arch"),
        ({"size": 10**6, "has_start": True}, [], "--size: not allowed with --finetune-from-model"),
        ({"size": 10**6, "is_paper": True}, [], "--size: not allowed with --preset paper, which sets the model"),
        ({"is_paper": True}, ["--max-epoch", "2"], "--max-epoch after --: .* needs a number of updates; give --passes"),
        ({"passes": 2}, ["--max-update", "3"], "--passes: not allowed with --max-update .*; omit --passes or --max-"),
        ({"tokens": None}, [], "--dry-run without a stream"),
        ({}, ["--arch", "transformer_lm"], "--arch transformer_lm after --: expected an architecture of this package"),
        ({}, ["--update-freq", "2,4"], "--update-freq 2,4 after --: give one value, or give --max-update"),
        ({}, ["--head-dim", "33"], "--head-dim 33: rotary embeddings need an even number"),
        ({"sizes": {"--num-experts": "4"}}, ["--moe-freq", "5"], "--moe-freq 5: gives no Switch layer in 2 layers"),
    ],
)
def test_contradicting_options_are_refused(given, words, message):
    with pytest.raises(ValueError, match=message):
        made(words, **given)


def test_an_alternative_option_replaces_a_default():
    assert "--max-update" not in options(made(["--max-epoch", "2"]))
    assert "--batch-size" not in options(made(["--max-tokens", "512"]))


def test_a_named_size_is_trained_like_the_default_model():
    found = options(made(["--arch", "alma_transformer_lm_tiny", "--max-update", "7"]))
    assert found["--optimizer"] == "muon" and "--decoder-embed-dim" not in found and found["--max-update"] == "7"


def test_defaults_stay_when_the_stream_has_grown_and_passes_may_change():
    first = made()
    again = made(tokens=[*TOKENS, 50_000_000], before=first.record)
    assert again.words == first.words and again.features == first.features and again.lines == first.lines
    more = made(tokens=TOKENS, before=first.record, passes=3)
    assert more.words == first.words and sum(more.lengths) == pytest.approx(3 * sum(first.lengths), abs=2)
    assert more.record["passes"] == 3 and made(before=more.record).record["passes"] == 3
    for other in ({"size": 10**6}, {"is_paper": True}):
        assert made(before=first.record, **other).words != first.words
    sized = made(size=10**6)
    assert made(before=sized.record).words == sized.words, "an option of the run need not be given again"


def test_the_paper_preset_has_a_schedule_for_each_stage_and_no_average():
    found = made(is_paper=True)
    given = options(found)
    assert given["--arch"] == "alma_switch_lm_base" and given["--lr-scheduler"] == "polynomial_decay"
    assert given["--total-num-update"] == given["--max-update"] and not found.features
    assert options(made([*COMPLETE, "--lr", "0.1"], is_paper=True))["--lr-scheduler"] == "polynomial_decay"


@pytest.mark.parametrize(
    ("context", "features"),
    [
        ({"continues": False}, {"ema_half_life"}),
        ({"selects_weights": True}, {"carry_optimizer"}),
        ({"selects_weights": True, "features": {"best_checkpoint": True}}, set()),
        ({"features": {"carry_optimizer": True}}, {"ema_half_life"}),
        ({"words": ["--lr", "0.1,0.2"]}, {"ema_half_life"}),
    ],
)
def test_given_and_impossible_features_get_no_default(context, features):
    assert made(**context).features.keys() == features


def test_a_run_that_starts_from_a_model_has_its_sizes_and_a_lower_rate():
    found = options(made(["--num-kv-heads", "3"], has_start=True))  # may divide the heads of the checkpoint
    assert "--decoder-embed-dim" not in found and float(found["--lr"]) < float(options(made())["--lr"]) / 5


def test_the_learner_may_set_the_number_of_experts_or_layers():
    sizes = {"--decoder-layers": "3", "--num-experts": "2"}
    found = made(owned=dict.fromkeys(sizes, ""), sizes=sizes)
    assert not sizes.keys() & options(found).keys()
    assert found.lines[0].endswith(", 3 layers, 2 experts") and "parameters" in found.lines[0]
    assert "parameters" not in made(["--moe-freq", "1"]).lines[0]
    assert made(["--decoder-embed-dim", "64"], size=10**6).lines[0].endswith("64 after -- overrides --size")


def test_sizes_are_read_and_invalid_ones_are_refused():
    assert [*map(read_size, ("auto", "800k", "1.5M", "2G"))] == [None, 800_000, 1_500_000, 2 * 10**9]
    for word in ("", "M", "-1", "nan", "big", "1e99"):
        with pytest.raises(ValueError, match="such as 800k or 25M"):
            read_size(word)


def test_options_are_grouped_with_their_values():
    words = ["-a", "x", "--max-epoch", "3", "--max-epoch", "4", "--adam-betas", "(0.9, 0.98)", "--cpu", "--lr=0.1"]
    options = TrainOptions([*words, "--stop-at", "-1", "--x", "-.5"])
    assert {name: " ".join(values) for name, values in options.options} == {
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
    assert dict(options.shared(num_procs).options) == {**dict(options.options), "--update-freq": (each,)}


@pytest.mark.parametrize("given", [[], ["2,1"], ["x"]])
def test_batches_that_are_no_multiple_of_the_processes_are_refused(given):
    message = "--num-procs 2: must divide the number of batches per update, found --update-freq "
    with pytest.raises(ValueError, match=f"{message}{(*given, '1')[0]} .after --"):
        TrainOptions([*BASE, *(["--update-freq", *given] if given else [])]).shared(2)


def test_lengthened_options_have_more_updates_and_the_same_warm_up():
    given = TrainOptions([*BASE, "--total-num-update", "12", "--warmup-updates", "3", "--lr", "1"])
    longer = given.lengthened(3)
    changed = {"--max-update": ("30",), "--total-num-update": ("36",)}
    assert dict(longer.options) == dict(given.options) | changed
    assert longer.max_update == 30
