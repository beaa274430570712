"""Ratios, regrets and trends of the ladder, of runs whose perplexities are known."""

import math

import numpy as np
import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.finding import Spread
from tests.recipes.programs import load
from tests.report.fakes import text_stream, write_run

tables, ladder, ladder_tables = load("tables"), load("ladder"), load("ladder_tables")


def keep(folder, width, finals, oracle=19.0, seeds=(1, 2, 3), params=1000):
    """Keep runs of rows with two rates, by their last perplexity with the better one."""
    runs = []
    for row, final in finals.items():
        for seed, rate in [(seed, rate) for seed in seeds for rate in ("0.1", "0.2") if rate == "0.1" or seed == 1]:
            name = f"{width}/{row}-lr{rate}-seed{seed}"
            worse = 0 if rate == "0.1" else 3
            values = [30.0, 26.0, 24.0, final + worse + 0.01 * seed]
            values = [final + worse + 0.01 * seed] if "-iid" in row else values
            options = {"iid": 4} if "-iid" in row else {}
            runs.append(
                write_run(folder / name, values, stream=text_stream(4), seed=seed, num_params=(params,), **options)
            )
    tables.keep(f"lm-ladder-{width}", runs)


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    return tmp_path


def row_of(table, name):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_its_best_rate_and_says_how_far_from_converged_it_began(records):
    keep(records, 16, {"sm-4": 20.0, "ens-2": 19.0})
    found = row_of(tables.ladder_of(tables.read("lm-ladder-16"), "rows"), "sm-4")
    assert found[1:4] == ["0.1 (lowest)", "2", "3"] and found[7:9] == ["20.02 ± 0.01", "0.667"]
    members = row_of(tables.ladder_of(tables.read("lm-ladder-16"), "rows"), "ens-2")
    assert members[1] == "0.1 (lowest)"  # an ensemble has its members' rate


def test_a_best_rate_inside_those_tried_does_not_say_that_it_lies_at_their_end(records):
    finals = {"0.05": 21.0, "0.1": 20.0, "0.2": 22.0}
    runs = [write_run(records / f"W/sm-4-lr{rate}-seed1", [30.0, 26.0, 24.0, final]) for rate, final in finals.items()]
    tables.keep("lm-ladder-16", runs)
    assert row_of(tables.ladder_of(tables.read("lm-ladder-16"), "rows"), "sm-4")[1:3] == ["0.1", "3"]


def test_hours_are_those_of_all_rates_and_of_seeds_side_by_side_once(records):
    keep(records, 16, {"sm-4": 20.0})
    assert ladder_tables.rungs_of()[16].hours("sm-4") == pytest.approx(2 * 4 * 12.5 / 3600)


def test_ratios_are_paired_over_seeds_and_stand_beside_the_papers(records):
    keep(records, 16, {"sm-4": 20.0, "sm-12": 18.0, "gmoe-copy": 20.0})
    found = tables.ladder_of(tables.read("lm-ladder-16"), "ratios")
    growing = row_of(found, "gmoe-copy to sm-4")
    assert growing[1:] == ["0.953", "1.000 [1.000, 1.000]", "3", "not decided (1)"]
    experts = row_of(found, "sm-12 to sm-4")
    assert experts[1] == "0.896" and experts[2].startswith("0.900 [") and experts[4] == "held (1)"


def test_what_waits_for_three_stands_beside_the_papers_third_arrival_and_is_no_claim(records):
    waiting = [
        write_run(
            records / f"W/sm-8-w3-lr0.1-seed{seed}", [25.0], stream=text_stream(4), seed=seed, wait=3, drop_rest=True
        )
        for seed in (1, 2)
    ]
    arriving = [
        write_run(records / f"W/sm-8-lr0.1-seed{seed}", [30.0, 26.0, 24.0, 23.0], stream=text_stream(4), seed=seed)
        for seed in (1, 2)
    ]
    tables.keep("lm-ladder-16", waiting + arriving)
    found = row_of(tables.ladder_of(tables.read("lm-ladder-16"), "ratios"), "sm-8-w3 to sm-8, t2")
    assert found[1:] == [f"{25.18 / 24.74:.3f}", "1.042 [1.042, 1.042]", "2", "no claim"]


def test_regret_counts_against_the_best_retraining(records):
    keep(records, 16, {"sm-4": 20.0, "sm-4-iid4": 19.0, "sm-4-wsd-iid4": 18.0, "ema-union": 18.0})
    found = tables.ladder_of(tables.read("lm-ladder-16"), "regret")
    assert "t3 (against sm-4-wsd-iid4)" in found
    assert row_of(found, "ema-union")[1] == "+0.00 ± 0.00 (held)"
    assert row_of(found, "sm-4")[1].endswith("(falsified)")


def test_beside_a_regret_stands_which_share_of_the_papers_is_closed(records):
    keep(records, 16, {"sm-4": 20.0, "sm-4-iid4": 18.0, "ema": 19.0, "ema-union": 18.0})
    found = tables.ladder_of(tables.read("lm-ladder-16"), "regret")
    assert row_of(found, "ema")[-1].startswith(f"{math.log(20 / 19) / math.log(20 / 18):.2f} [")
    assert row_of(found, "ema-union")[-1] == "1.00 [1.00, 1.00]" and row_of(found, "sm-4")[-1] == "–"


def test_one_seed_decides_nothing(records):
    keep(records, 16, {"sm-4": 20.0, "sm-12": 18.0, "sm-4-iid4": 19.0}, seeds=(1,))
    runs = tables.read("lm-ladder-16")
    assert row_of(tables.ladder_of(runs, "ratios"), "sm-12 to sm-4")[4] == "one seed (1)"
    assert "(one seed)" in row_of(tables.ladder_of(runs, "regret"), "sm-4")[1]


def test_a_line_through_sizes_has_an_interval_from_three_on():
    points = [(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]
    assert ladder_tables.fit(points[:1], 10.0) is None
    assert ladder_tables.fit(points[:2], 10.0) == (2.0, pytest.approx(21.0), None)
    slope, value, half = ladder_tables.fit(points, 10.0)
    assert (slope, value, half) == (pytest.approx(2.0), pytest.approx(21.0), pytest.approx(0.0, abs=1e-9))
    *_, half = ladder_tables.fit([(1.0, 3.0), (2.0, 5.3), (3.0, 7.0)], 2.0)
    error = math.sqrt(0.1**2 + 0.2**2 + 0.1**2)  # of the line 1.1 + 2 x, one degree of freedom
    assert half == pytest.approx(12.706 * error * math.sqrt(1 + 1 / 3))


def test_a_trend_is_told_as_far_as_there_are_sizes(records):
    keep(records, 16, {"sm-4": 20.0, "sm-12": 18.0})
    assert row_of(tables.ladder_of(tables.read("lm-ladder-16"), "trend"), "sm-12 to sm-4")[2:] == [
        "one size", "–", "0.896",
    ]  # fmt: skip
    with pytest.raises(AlmaError, match="rows of two sizes or more are needed for a trend; there are 1"):
        ladder_tables.draw(ladder_tables.rungs_of(), records / "ladder.svg")
    keep(records / "more", 24, {"sm-4": 20.0, "sm-12": 17.0}, params=2000)
    two = row_of(tables.ladder_of(tables.read("lm-ladder-24"), "trend"), "sm-12 to sm-4")
    assert two[4].endswith("two sizes: no interval") and two[3].startswith("x 0.8")
    keep(records / "most", 32, {"sm-4": 20.0, "sm-12": 16.0}, params=4000)
    assert "the paper's is not in it" in row_of(ladder_tables.trend_table(ladder_tables.rungs_of()), "sm-12 to sm-4")[5]
    ladder_tables.draw(ladder_tables.rungs_of(), records / "ladder.svg")
    assert (records / "ladder.svg").stat().st_size > 1000


def test_a_trend_has_the_regret_and_how_far_growing_goes(records):
    base = {"sm-4": 20.0, "sm-12": 18.0, "sm-4-iid4": 19.0}
    keep(records, 16, {**base, "gmoe-copy": 19.0, "ema": 19.0})
    keep(records / "more", 24, {**base, "gmoe-copy": 18.0, "ema": 20.0}, params=10_000)
    found = ladder_tables.trend_table(ladder_tables.rungs_of())
    growing = row_of(found, "way from 4 to 12 experts: gmoe-copy")
    share = math.log(20 / 19) / math.log(20 / 18)
    assert growing[1].startswith(f"{share:.2f} [") and growing[2] == "1.00 [1.00, 1.00]" and growing[-1] == "0.44"
    assert growing[3] == f"{1 - share:+.2f}"
    regret = row_of(found, "ema to the best retraining")
    assert regret[1] == "1.000 [1.000, 1.000]" and regret[2].startswith("1.053 [") and regret[-1] == "–"


def test_no_share_of_a_way_is_told_where_twelve_experts_are_no_better(records):
    keep(records, 16, {"sm-4": 20.0, "sm-12": 20.5, "gmoe-copy": 19.0})
    assert "way from" not in ladder_tables.trend_table(ladder_tables.rungs_of())


def test_a_size_of_which_growth_alone_was_measured_is_no_part_of_the_trend(records):
    keep(records, 16, {"sm-4": 20.0, "sm-12": 18.0})
    keep(records / "more", 24, {"depth-1": 21.0, "depth-6": 20.0})
    found = ladder_tables.trend_table(ladder_tables.rungs_of())
    assert "width 24" not in found and row_of(found, "sm-12 to sm-4")[2] == "one size"
    ladder_tables.draw_frontier(ladder_tables.rungs_of(), records / "frontier.svg")
    drawn = (records / "frontier.svg").read_text()
    assert "width 24" in drawn and "width 16" not in drawn


def test_a_frontier_has_losses_over_all_flops_so_far_and_leads_at_equal_ones(records):
    flops = {"depth-6": [4e9] * 4, "depth-1": [1e9] * 4, "deeper-1-1-6-6": [1e9, 1e9, 4e9, 4e9]}
    losses = {"depth-6": [3.4, 3.2, 3.1, 3.0], "depth-1": [3.6, 3.5, 3.4, 3.3], "deeper-1-1-6-6": [3.6, 3.5, 3.2, 3.03]}
    runs = [
        write_run(records / f"{row}-lr0.1-seed{seed}", [math.exp(loss + 0.01 * seed) for loss in losses[row]],
                  stream=text_stream(4), seed=seed, stage_extras=[{"train_flops": each} for each in flops[row]])
        for row in flops for seed in (1, 2)
    ]  # fmt: skip
    tables.keep("lm-ladder-16", runs)
    found = tables.ladder_of(tables.read("lm-ladder-16"), "frontier")
    grown = row_of(found, "deeper-1-1-6-6")
    assert grown[3:5] == ["2", "62 %"] and grown[8].startswith("1.00e+10, 3.045")
    assert grown[9] == "+1.00 ± 0.02 %"  # 0.9967 of a loss of 3.01 and 0.9934 of one of 3.02
    lead = tables.ladder_of(tables.read("lm-ladder-16"), "lead")
    (beyond, within) = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lead.splitlines() if line.startswith("| deeper-1-1-6-6 ")
    )  # fmt: skip
    assert beyond[1] == "depth-1" and beyond[3] == "+0.0000 ± 0.0000" and beyond[4:] == ["–", "–"]
    at_six = 3.4 + (3.2 - 3.4) * math.log(6 / 4) / math.log(8 / 4)
    assert within[1] == "depth-6" and within[3] == "–" and within[4] == f"{3.2 - at_six:+.4f} ± 0.0000"


def test_costs_are_those_of_the_seed_that_needed_least_and_areas_are_over_them(records):
    losses = {"width-4": [3.4, 3.2, 3.1, 3.0], "wider-1-1-4-4": [3.5, 3.4, 3.2, 3.1]}
    seconds = {"width-4": (40.0, 90.0), "wider-1-1-4-4": (70.0, 20.0)}
    runs = [
        write_run(records / f"{row}-lr0.1-seed{seed}", [math.exp(loss) for loss in losses[row]], stream=text_stream(4),
                  seed=seed, stage_extras=[{"train_flops": 1e9, "wall_seconds": seconds[row][seed - 1]}] * 4)
        for row in losses for seed in (1, 2)
    ]  # fmt: skip
    tables.keep("lm-ladder-16", runs)
    cells = row_of(tables.ladder_of(tables.read("lm-ladder-16"), "costs-width"), "wider-1-1-4-4")
    assert cells[1] == "2" and cells[2] == "100 %" and cells[6] == "50 %"
    at_half = [(math.log(20 * stage), loss) for stage, loss in enumerate(losses["wider-1-1-4-4"], start=1)]
    own = np.interp(places := np.linspace(math.log(40), math.log(80), 10_001), *zip(*at_half, strict=True))
    whole = [(math.log(40 * stage), loss) for stage, loss in enumerate(losses["width-4"], start=1)]
    expected = np.mean(own - np.interp(places, *zip(*whole, strict=True)))
    assert float(cells[7].split()[0]) == pytest.approx(expected, abs=1e-4)
    ladder_tables.draw_frontier(ladder_tables.rungs_of(), records / "frontier.svg")
    drawn = (records / "frontier.svg").read_text()
    assert "widths" in drawn and "wider-1-1-4-4 (2 seeds)" in drawn and "depth-6" not in drawn


def test_the_area_between_two_frontiers_is_their_mean_distance_where_both_are():
    line = [(1.0, 4.0), (10.0, 3.0), (100.0, 2.0)]
    below = [(10.0, 2.5), (100.0, 1.5), (1000.0, 1.0)]
    assert ladder_tables.area_between(below, line) == pytest.approx(-0.5)
    assert ladder_tables.area_between(line[:2], below[1:]) is None


def test_a_difference_of_nothing_has_no_minus():
    assert ladder_tables._show_gap(Spread.of({1: -0.00001}), 4) == "+0.0000"
