"""What is chosen where nothing stands behind ``--``, and that what stands there wins."""

import pytest

from fairseq_alma.data.stream import Split, Stream, TokenizerEntry
from fairseq_alma.learners.learner import stages
from fairseq_alma.options import group_words
from fairseq_alma.runs.study import read_size
from fairseq_alma.text import model_size, recipe
from fairseq_alma.text.model_size import Shape, Speed, Wish
from fairseq_alma.text.recipe import Asked, complete

OWN = ["--arch", "alma_switch_lm_tiny", "--max-update", "5", "--batch-size", "4"]
COMPLETE = [*OWN, "--criterion", "cross_entropy", "--optimizer", "adam", "--lr", "0.002"]
NO_FEATURES = dict.fromkeys(("ema_half_life", "carry_optimizer", "rewarm"))


def split(name, num_tokens):
    return Split(
        name=name, files=(), num_documents=1, num_words=num_tokens, num_tokens=num_tokens, num_bytes=num_tokens
    )


def stream_of(*tokens, vocab_size=996, test=2000):
    splits = [split(f"megabatch-{t:03d}/train", each) for t, each in enumerate(tokens)]
    splits += [split("valid", 1000), split("test", test)]
    return Stream(None, "text", 1, tuple(splits), TokenizerEntry("tokenizers", vocab_size, "0" * 64, ()))


def unmeasured(shapes, tokens):
    raise AssertionError("nothing is to be measured")


def at_speed(flops_per_second):
    return lambda shapes, tokens: Speed([shape.flops / flops_per_second for shape in shapes])


def made(words=(), stream=None, wish=None, before=None, measure=unmeasured, **asked):
    stream = stream_of(2_000_000, 1_000_000) if stream is None else stream
    known = {"owned": {}, "experts": None, "goes_on": True, "features": NO_FEATURES, **asked}
    planned = stages(stream.num_megabatches, 1)
    return complete([*words], Asked(wish=wish or Wish(), **known), stream, planned, before, measure)


def options(found):
    return {name: " ".join(values) for name, values in group_words(found.words)}


def test_nothing_given_makes_a_whole_command():
    found = made()
    given = options(found)
    assert given["--criterion"] == "alma_switch_cross_entropy" and float(given["--lr"]) < 0.05
    assert {"--arch", "--optimizer", "--batch-size", "--max-update", "--warmup-updates"} <= given.keys()
    assert found.features == {"ema_half_life": "1/16", "carry_optimizer": True}
    assert len(found.lines) == 5 and found.record["chosen"] == found.chosen


def test_stages_are_as_long_as_their_text():
    found = made()
    long, short = found.lengths([2_000_000, 1_000_000])
    assert abs(long - 2 * short) <= 1 and options(found)["--max-update"] == str(long)
    twice = made(wish=Wish(passes=2))
    assert abs(sum(twice.lengths([2_000_000, 1_000_000])) * recipe.tokens_per_update(options(twice)) / 6e6 - 1) < 0.01


@pytest.mark.parametrize(
    "word", ["--lr 0.02", "--num-experts 8", "--decoder-layers 3", "--optimizer adam", "--batch-size 5"]
)
def test_what_is_given_wins(word):
    name, value = word.split()
    found = made([name, value])
    assert options(found)[name] == value and name not in found.chosen
    assert [each for each, _ in group_words(found.words)].count(name) == 1


@pytest.mark.parametrize(("flag", "word"), [("--max-update", "--max-epoch 2"), ("--batch-size", "--max-tokens 512")])
def test_what_stands_for_an_option_counts_as_it(flag, word):
    assert flag not in options(made(word.split()))


def test_a_complete_command_is_left_as_it_is():
    found = made(COMPLETE)
    assert found.words == COMPLETE and not found.chosen and not found.features and found.record is None
    assert complete(COMPLETE, Asked(Wish(), {}, None, True, NO_FEATURES), None, [], None, unmeasured).words == COMPLETE


@pytest.mark.parametrize("left_out", ["--criterion", "--optimizer", "--lr"])
def test_of_an_own_model_only_what_trains_no_language_model_by_default_is_filled_in(left_out):
    place = COMPLETE.index(left_out)
    found = made(COMPLETE[:place] + COMPLETE[place + 2 :])
    assert left_out in found.chosen and not found.features
    assert not {"--decoder-layers", "--dropout", "--tokens-per-sample"} & found.chosen.keys()
    assert float(options(found)["--lr"]) <= recipe.RATE


def test_more_text_makes_a_larger_model_and_batch():
    small, large = made(stream=stream_of(10**6)), made(stream=stream_of(10**9))
    assert int(options(large)["--decoder-embed-dim"]) > int(options(small)["--decoder-embed-dim"])
    assert recipe.tokens_per_update(options(large)) > recipe.tokens_per_update(options(small))
    assert options(large)["--lr"] == options(small)["--lr"]
    assert options(small)["--adam-betas"] == "(0.9, 0.99)" and options(large)["--adam-betas"] == "(0.9, 0.95)"


@pytest.mark.parametrize("size", [200_000, 1_000_000, 30_000_000])
def test_a_size_is_met_within_a_third(size):
    width, layers = (int(options(made(wish=Wish(size=size)))[f"--decoder-{name}"]) for name in ("embed-dim", "layers"))
    assert 0.67 < Shape(width, layers, 1000).num_params / size < 1.5


@pytest.mark.parametrize(
    ("wish", "words", "message"),
    [
        (Wish(size=10**11), [], "--size 100,000,000,000: from"),
        (Wish(size=10), [], "--size 10: from"),
        (Wish(size=10**6), OWN, "--size chooses a model, and --arch"),
        (Wish(hours=1), OWN, "--hours chooses a model, and --arch"),
        (Wish(passes=2), ["--max-update", "3"], "--passes: --max-update or --max-epoch"),
        (Wish(size=10**6, passes=1, hours=1), [], "--hours decides what of --size and --passes"),
    ],
)
def test_what_contradicts_itself_is_refused(wish, words, message):
    with pytest.raises(ValueError, match=message):
        made(words, wish=wish)


def test_a_model_beyond_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(model_size, "memory", lambda: 2**28)
    with pytest.raises(ValueError, match=r"--size 50,000,000: training takes about \d\.\d GiB of memory, .* has 0\.2"):
        made(["--cpu"], wish=Wish(size=50_000_000))


def test_hours_choose_a_model_that_they_suffice_for():
    plans = {}
    for hours in (0.1, 1, 10):
        found = made(wish=Wish(hours=hours), measure=at_speed(1e10))
        given = options(found)
        shape = Shape(int(given["--decoder-embed-dim"]), int(given["--decoder-layers"]), 1000)
        plans[hours] = (shape.num_params, found.passes)
        assert shape.flops / 1e10 * found.passes * 3e6 <= hours * 3600
        assert "forecast" in found.lines[1]
    assert plans[0.1][0] < plans[1][0] < plans[10][0]


def test_hours_with_a_size_choose_the_passes_and_the_other_way_round():
    slow = at_speed(1e9)
    found = made(wish=Wish(hours=0.5, size=200_000), measure=slow)
    assert 0 < found.passes < 10
    found = made(wish=Wish(hours=2, passes=2), measure=slow)
    assert found.passes == 2


@pytest.mark.parametrize("wish", [Wish(hours=0.001), Wish(hours=0.05, size=10**8), Wish(hours=0.01, passes=100)])
def test_too_few_hours_are_refused_with_how_many_it_takes(wish):
    with pytest.raises(ValueError, match=r"--hours 0\.\d+: too short for .*, which takes [\d.e+]+ here"):
        made(wish=wish, measure=at_speed(1e9))


@pytest.mark.parametrize(("test", "is_said"), [(100_000, False), (30_000_000, True)])
def test_hours_that_testing_takes_are_said_to_be_of_the_stream(test, is_said):
    with pytest.raises(ValueError, match=r"too short for the smallest model") as refused:
        made(stream=stream_of(1_000_000, 1_000_000, test=test), wish=Wish(hours=0.001), measure=at_speed(1e9))
    assert ("less to test on (--test-bytes 5%): most of it is 2 tests" in str(refused.value)) == is_said


def test_what_was_chosen_stays_chosen_when_the_stream_has_grown():
    first = made()
    longer = stream_of(2_000_000, 1_000_000, 50_000_000)
    again = made(stream=longer, before=first.record)
    assert again.words == first.words and again.features == first.features and again.lines == first.lines
    assert again.lengths([2_000_000, 1_000_000, 50_000_000])[:2] == first.lengths([2_000_000, 1_000_000])
    for wish in (Wish(size=10**6), Wish(is_paper=True)):
        assert made(stream=longer, before=first.record, wish=wish).words != first.words
    sized = made(wish=Wish(size=10**6))
    assert made(before=sized.record).words == sized.words, "what was said need not be said again"


def test_the_paper_s_way_has_a_schedule_for_each_stage_and_no_average():
    found = made(wish=Wish(is_paper=True))
    given = options(found)
    assert given["--arch"] == "alma_switch_lm_base" and given["--lr-scheduler"] == "polynomial_decay"
    assert given["--total-num-update"] == given["--max-update"] and not found.features


@pytest.mark.parametrize(
    ("asked", "features"),
    [
        ({"goes_on": False}, {"ema_half_life"}),
        ({"is_tested_otherwise": True}, {"carry_optimizer"}),
        ({"features": {**NO_FEATURES, "rewarm": "full"}}, {"ema_half_life"}),
    ],
)
def test_features_that_are_given_or_cannot_be_are_not_switched_on(asked, features):
    assert made(**asked).features.keys() == features


def test_a_learner_that_says_how_many_experts_is_not_told():
    found = made(owned={"--num-experts": ""}, experts=2)
    assert "--num-experts" not in options(found)


@pytest.mark.parametrize(("word", "size"), [("auto", None), ("800k", 800_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9)])
def test_sizes_are_read(word, size):
    assert read_size(word) == size


@pytest.mark.parametrize("word", ["", "M", "-1", "nan", "big", "1e99"])
def test_sizes_that_are_none_are_refused(word):
    with pytest.raises(ValueError, match="such as 800k or 25M"):
        read_size(word)


def test_without_a_stream_nothing_can_be_chosen():
    with pytest.raises(ValueError, match="--dry-run without a stream"):
        complete([], Asked(Wish(), {}, None, True, NO_FEATURES), None, [], None, unmeasured)
