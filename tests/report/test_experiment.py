import math

import pytest

from fairseq_alma.report.read_run import Spread, iid_pairs
from tests.report.fakes import image_stream, text_stream


def batch(*sizes):
    return {"train_options": dict(zip(("--batch-size", "--update-freq"), sizes, strict=False))}


def test_a_spread_is_mean_deviation_and_a_95_percent_interval():
    spread = Spread.of({1: 1.0, 2: 3.0, 3: math.nan})
    assert (spread.mean, spread.deviation, spread.show(1)) == (2.0, pytest.approx(math.sqrt(2)), "2.0 ± 1.4")
    assert spread.half_interval() == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2))
    assert Spread.of({1: 5.0}).show(2) == "5.00" and Spread.of({1: math.nan}) is None
    assert spread.minus(Spread.of({1: 0.5, 4: 9.0})).by_seed == {1: 0.5}


def test_runs_that_differ_by_their_seeds_alone_are_averaged(groups):
    runs = [{"values": [30.0 + s, 20.0 + 2 * s], "stream": text_stream(2), "seed": s} for s in (1, 2, 3)]
    other = {"values": [99.0, 99.0], "stream": text_stream(2), "init": "scratch"}
    under_way = {"values": [50.0], "stream": text_stream(2), "seed": 4}
    one, two = groups(*runs, other, under_way)
    assert [run.seeds[0] for run in one.runs] == [1, 2, 3, 4]
    assert one.spread(lambda run: run.final) == Spread(24.0, 2.0, {(s, None): 20.0 + 2 * s for s in (1, 2, 3)})
    assert list(one.course.curve) == [32, 24] and list(one.course.deviation) == [1, 2]
    assert two.name.startswith("SM_w1, 4 experts, --init scratch")


def test_streams_of_images_in_another_order_belong_together(groups):
    others = {"augment": True}, {"valid": {"num_images": 9}, "fingerprint": "f" * 64}
    streams = image_stream(4), image_stream(4, seed=2), *(image_stream(4) | other for other in others)
    first, *_ = found = groups(*({"stream": each} for each in streams))
    names = ["no --augment, 4 arrivals, 00000000", "--augment", "no --augment, 4 arrivals, ffffffff"]
    assert [each.name for each in found] == [f"SM_w1, 4 experts, {name}" for name in names] and len(first.runs) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([{"stream": text_stream(2), "values": [30, 29]}, {"values": [30, 29, 28, 27]}], ["2 arrivals", "4 arrivals"]),
        ([batch(4, 1), batch(2, 2), batch(4, 2), batch()], ["--batch-size 4", "--batch-size 8", "no --batch-size"]),
        ([{"grow_method": "split"}, {"grow_method": "copy"}], ["--grow-method copy", "--grow-method split"]),
        ([{"wait": 4}, {"wait": 4, "drop_rest": True}], ["--drop-rest", "no --drop-rest"]),
        ([{"drop_rest": True}, {"new_first": 1.0}, {}], ["--drop-rest", "--new-first 1", "no --drop-rest"]),
    ],
)
def test_runs_are_told_apart_by_the_options_that_differ(options, told, groups):
    assert sorted(each.name.split(", ")[2] for each in groups(*options)) == told


def test_names_hold_sizes_and_counts_of_experts(groups):
    sizes = [{"train_options": {"--arch": "alma_switch_lm", "--decoder-embed-dim": d}} for d in ("64", "96")]
    assert groups({"train_options": {"--arch": "alma_transformer_lm_mini"}})[0].first.size == "mini"
    assert [each.name for each in groups(*sizes, {"num_experts": (8,)}, {"wait": 2})] == [
        "SM_w1, 8 experts", "SM_w2", "SM_w1, width 64", "SM_w1, width 96",
    ]  # fmt: skip


def test_longer_stages_are_named_as_in_table_2(groups):
    updates = [{"wait": wait, "train_options": {"--max-update": str(100 * wait)}} for wait in (1, 3)]
    assert [each.label for each in groups(*updates)] == ["SM_w1", "SM_w3 (3x steps)"]


def test_names_of_dense_models_have_only_the_flag_of_a_switch(groups):
    found = groups(*({"num_experts": (1,), "best_checkpoint": best} for best in (True, False)))
    assert {each.name for each in found} == {f"SM_w1, dense, {no}--best-checkpoint" for no in ("", "no ")}


def test_lengths_that_follow_from_the_text_are_compared_in_passes(groups):
    def chosen(updates, passes, **more):
        options = {"--max-update": updates}
        recipe = {"chosen": options, "passes": passes, "preferences": {}, "features": more, "lines": []}
        return {"train_options": options, "recipe": recipe}

    iid, one = {"iid": 3, **chosen("87", 1.0)}, {"carry_optimizer": True, **chosen("28", 1.0, carry_optimizer=True)}
    two = one | {"recipe": one["recipe"] | {"passes": 2.0}}  # of a later stage; run.json has the last number
    found = groups(iid, one, two, {"wait": 2, **chosen("56", 4.0)})
    assert [each.label for each in found] == ["SM_w1", "SM_w1 (2x steps)", "SM_w2 (4x steps)", "SM iid k3"]
    assert [(control.label, each.label) for control, each, _ in iid_pairs(found)] == [("SM iid k3", "SM_w1")]


def test_an_iid_control_finds_the_learner_of_its_settings(groups):
    found = groups({"learner": "ens", "iid": 3}, {"learner": "ens"}, {"learner": "ens", "wait": 3}, {"iid": 3})
    (pair,) = iid_pairs(found)
    assert (pair[0].label, pair[1].label, pair[2]) == ("Ens iid k3", "Ens_w1", 3)
