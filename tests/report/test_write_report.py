import csv
import io
import math
import shutil

import pytest

from fairseq_alma.report.read_run import experiments, load_run
from fairseq_alma.report.write_report import (
    Cell,
    Report,
    Table,
    all_tables,
    describe_run,
    growth_table,
    result_table,
    sentences,
    show_count,
    shown_arrivals,
)
from tests.report.fakes import image_stream, text_stream


@pytest.fixture
def tables(groups):
    return lambda *options: {table.name: table for table in all_tables(groups(*options))}


def texts(row):
    return {title: cell if isinstance(cell, str) else cell.text for title, cell in row.items()}


@pytest.mark.parametrize(
    ("values", "options", "shown", "average", "final"),
    [
        ([30.0, 28.0, 26.0, 24.0], {}, ["30.00", "28.00", "26.00", "24.00"], "27.00", "24.00"),
        ([24.0], {"wait": 4}, ["*", "*", "*", "24.00"], "43.50", "24.00"),  # (3 * 50 + 24) / 4, of 50 units
        ([25.0], {"wait": 3, "drop_rest": True}, ["*", "*", "25.00", "*"], "37.50", "25.00"),
        ([30.0], {}, ["30.00", "–", "–", "–"], "–", "–"),
        ([], {}, ["–"] * 4, "–", "–"),
        ([24.3], {"iid": 3}, ["*", "*", "24.30", "*"], "–", "24.30"),
    ],
    ids=["complete", "waits", "drops the rest", "under way", "not begun", "iid"],
)
def test_a_row_has_each_arrival_their_mean_and_the_last_value(values, options, shown, average, final, tables):
    (row,) = tables({"values": values, **options})["perplexity"].rows
    row = texts(row)
    assert [row[f"t{t}"] for t in range(4)] == shown
    assert (row["avg PPL"], row["final PPL"]) == (average, final)


def test_cost_is_summed_over_the_stream(tables):
    table = tables({"learner": "ens", "num_members": (2,), "num_params": (1000,), "train_flops": 1e15})["cost"]
    (row,) = table.rows
    assert (row["Mem"].number, row["Comp"].number, row["updates"].number) == (4000, 8e15, 40)
    assert row["time"] == "0:50" and row["hours"].number == pytest.approx(4 * 12.5 / 3600)
    assert "| 0:50 " in table.markdown() and "hours" not in table.markdown() and ",hours\n" in table.csv()


def test_growth_has_a_row_for_each_step(tables, runs):
    grows = {"values": [40.0, 20.0, 18.0], "learner": "gmoe", "stream": text_stream(3), "num_experts": (4, 6)}
    extras = [{}, {"after_growth": {"valid": {"loss": 4.6, "ppl": 25.0}}}]
    wider = {"values": [40.0, 20.0], "stream": text_stream(3), "num_params": (1000, 1500), "stage_extras": extras}
    first, row = map(texts, tables(grows, wider)["growth"].rows)
    assert (first["at"], first["experts"], row["experts"]) == ("t1", "1,000 to 1,500 parameters", "4 to 6")
    assert (row["before"], row["after growth"], row["after training"]) == ("42.00", "25.00", "21.00")
    (gap,) = runs(grows)
    shutil.rmtree(gap.path / "stage-000")
    assert growth_table(experiments([load_run(gap.path)])).rows[0]["experts"] == "–"


def test_controls_stand_next_to_what_learns_sequentially_and_are_never_the_best(tables):
    sequential = [{"values": [30.0, value, 18.0, 16.0], "seed": seed} for seed, value in ((1, 20.0), (2, 22.0))]
    found = tables(*sequential, {"values": [10.0], "iid": 2}, {"wait": 4, "values": [17.0]})
    (row,) = found["iid"].rows
    assert (row["k"].number, row["i.i.d."].number, row["sequential"].number, row["gap"].text) == (2, 10, 21, "+100.0%")
    assert [row[-2][1] for row in found["perplexity"].body()] == [True, False, False]


def test_figures_of_an_evaluation_have_a_row_each(tables):
    said = [{"evaluation": {"command": "x", "figures": {"accuracy": 0.5 + 0.1 * stage}}} for stage in range(2)]
    (row,) = tables({"stream": text_stream(2), "stage_extras": said})["evaluation"].rows
    assert (row["metric"], row["t0"].text, row["t1"].text) == ("accuracy", "0.5", "0.6")


def test_held_out_parts_have_a_row_for_each_arrival(tables):
    figures = [{"loss": 8.0, "ppl": 256.0, "bits_per_byte": bits} for bits in (2.0, 3.0, 3.5)]
    old, new = ({"megabatch": t, **figures[t]} for t in (0, 1))
    extras = [{"holdouts": [old]}, {"holdouts": [old, {**new, "before": figures[2]}]}]
    first, second = map(texts, tables({"stream": text_stream(2), "stage_extras": extras})["holdouts"].rows)
    assert (first["newest, before"], first["m0"], first["m1"]) == ("–", "2.000", "–")
    assert (second["newest, before"], second["m0"], second["m1"]) == ("3.500", "2.000", "3.000")


def test_of_many_arrivals_people_see_some_and_programs_all(tables):
    table = tables({"stream": image_stream(40)})["error"]
    assert [title for title in table.header if title[1:].isdecimal()] == [f"t{t}" for t in shown_arrivals(40)]
    assert len([title for title in table.csv().splitlines()[0].split(",") if title[1:].isdecimal()]) == 40
    found = tables({"wait": 2}, {"learner": "ens", "stream": text_stream(5)})  # in the order of the stream
    assert found["perplexity"].header[4:9] == list(found["runs"].rows[0])[-5:] == [f"t{t}" for t in range(5)]


def test_a_table_is_markdown_csv_and_latex():
    rows = [{"learner": "a|b_1", "PPL": Cell("2.50 ± 0.10", 2.5, 0.1)}, {"learner": "–", "PPL": Cell("3.00", 3.0)}]
    table = Table("x", "Title", "Notes.", rows, best=["PPL"])
    assert "| a\\|b_1  | **2.50 ± 0.10** |" in table.markdown()
    assert list(csv.DictReader(io.StringIO(table.csv()))) == [
        {"learner": "a|b_1", "PPL": "2.5", "PPL std": "0.1"}, {"learner": "", "PPL": "3.0", "PPL std": ""},
    ]  # fmt: skip
    assert r"a|b\_1 & \textbf{2.50 $\pm$ 0.10} \\" in table.latex()


def test_counts_have_three_digits():
    assert [show_count(value) for value in (12, 65_432, 65_400_000, 999.7e6, 1.5e12, 3.62e15)] == [
        "12", "65.4k", "65.4M", "1,000M", "1.5T", "3.62e+15",
    ]  # fmt: skip


def test_two_sentences_say_who_was_best_by_how_much_and_over_how_many_seeds(groups):
    two = text_stream(2)  # both have the same average
    sm = [{"values": [30.0, 20.0 + s / 10], "stream": two, "seed": s} for s in (1, 2, 3)]
    ens = [{"values": [32.0, 18.0 + s / 10], "stream": two, "seed": s, "learner": "ens"} for s in (1, 2, 3)]
    end, avg = sentences(groups(*sm, *ens))
    assert end == (
        "Best at the end: Ens_w1, test perplexity 18.20 ± 0.10 over 3 seeds, 9.9 % lower than SM_w1 (20.20 ± 0.10)."
    )
    assert avg.startswith("Best over all 2 arrivals: SM_w1, avg PPL 25.10 ± 0.05 over 3 seeds, equal to Ens_w1 (25.10")
    assert "not significant" in avg


def test_one_seed_and_runs_under_way_are_no_evidence(groups):
    one = {"stream": image_stream(4)}
    end, _ = sentences(groups(one, {**one, "learner": "ens", "num_members": (5,)}))
    assert "over 1 seed," in end and end.endswith("another seed may change the order.")


def test_learners_that_diverged_or_that_are_not_complete_are_not_compared(groups):
    one = {"stream": text_stream(2), "values": [30.0, math.inf]}
    assert not any(sentences(groups(one, {**one, "learner": "ens"})))
    assert not any(sentences(groups({}, {"learner": "ens", "num_stages": 1})))


def test_models_of_several_vocabularies_are_compared_in_bits_per_byte(groups):
    streams = [text_stream(vocab_size=size, fingerprint=str(size) * 32) for size in (50, 60)]
    found = groups(*({"values": [20.0 + n] * 4, "stream": each} for n, each in enumerate(streams)))
    (sentence,) = sentences(found)
    assert ", bits per byte 1.080 over 1 seed" in sentence and result_table(found).best == {"bits per byte"}


def test_a_single_run_is_described(runs):
    (run,) = runs({"values": [30.0, 24.0], "stream": text_stream(2)})
    (run.path / "sample.txt").write_text("In the beginning\n")
    log = '2026 | INFO | train | {"epoch": 1, "train_loss": "5", "train_nll_loss": "4.0", "train_ppl": "16"}\n'
    (run.path / "stage-001" / "train-member-0.log").write_text(log)
    details = dict(Report([run]).details)
    assert details["Newest model"].startswith("after mega-batch 2 of 2: test perplexity 24.00, 1.146 bits per byte, 1k")
    assert details["Last arrival"] == "test perplexity 20.0 % lower than after the previous stage (30.00)"
    assert details["Training and test"] == "mean train perplexity 16.00 in the last epoch, test perplexity 24.00"
    assert details["Sample of text, SM_w1"] == "In the beginning"


def test_nothing_is_said_of_a_run_that_has_not_begun_and_no_gain_of_a_diverged_one(runs):
    run, diverged = runs({"num_stages": 0}, {"values": [30.0, math.nan], "stream": text_stream(2)})
    assert list(describe_run(run)) == [] and [title for title, _ in describe_run(diverged)] == ["Newest model"]
