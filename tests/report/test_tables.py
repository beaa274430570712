import csv
import io

import pytest

from fairseq_alma.report.tables import all_tables, shown_arrivals
from tests.report.fakes import image_stream, table_of, text_stream, write_run


def tables(runs, **options):
    return {table.name: table for table in all_tables(table_of(runs), **options)}


def rows(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_many_arrivals_are_shown_in_tenths_and_written_in_full(tmp_path):
    found = tables([write_run(tmp_path / "R", stream=image_stream(500), wait=50, num_experts=(1,))])["error"]
    assert [title for title in found.header if title[:1] == "t" and title[1:].isdigit()] == [
        f"t{t}" for t in range(49, 500, 50)
    ]
    (row,) = rows(found)
    assert row["t0"] == "" and float(row["t49"]) == pytest.approx(0.1 + 0.4 * 2.718281828 ** (-49 / 5))
    assert shown_arrivals(20) == list(range(20))
    assert len(shown_arrivals(21)) == 10


def test_errors_are_shown_in_percent_and_summed_in_percent_points(tmp_path):
    found = tables([write_run(tmp_path / "R", [0.5, 0.25], stream=image_stream(2), num_experts=(1,))])["error"]
    (row,) = texts(found)
    assert row[:-1] == ["SM_w1", "1", "1k", "50.00", "25.00", "75.0", "25.00", "2.00e+12"]


def test_rows_that_differ_by_their_seeds_say_so(tmp_path):
    runs = [write_run(tmp_path / f"R{seed}", [30.0, 20.0 + seed], stream=text_stream(2), seed=seed) for seed in (1, 2)]
    assert "seed" not in tables(runs[:1])["perplexity"].header
    found = tables(runs)["perplexity"]
    assert [(row["seed"], row["t1"]) for row in rows(found)] == [("1", "21.0"), ("2", "22.0")]
    assert "**21.00**" in found.markdown() and "**1**" not in found.markdown()


def test_the_best_of_each_column_is_marked_where_there_are_two(tmp_path):
    runs = [write_run(tmp_path / "A", [30.0, 20.0], stream=text_stream(2))]
    assert "**" not in tables(runs)["perplexity"].markdown()
    runs.append(write_run(tmp_path / "B", [29.0, 21.0], stream=text_stream(2), learner="ens"))
    found = tables(runs)["perplexity"]
    assert "**29.00** |     21.00" in found.markdown()
    assert r"\textbf{20.00}" in found.latex()
    assert r"SM\_w1" in found.latex()


def test_the_summary_has_mean_and_deviation_of_complete_runs(tmp_path):
    runs = [write_run(tmp_path / f"R{seed}", [30.0 + seed] * 4, seed=seed) for seed in (1, 2, 3)]
    found = tables([*runs, write_run(tmp_path / "going", [9.0], seed=4)])["summary"]
    (row,) = rows(found)
    assert (row["seeds"], row["avg PPL"], row["avg PPL deviation"], row["Mem"]) == ("3", "32.0", "1.0", "4000.0")
    assert texts(found)[0][:5] == ["SM_w1", "4", "3 of 4", "32.00 ± 1.00", "32.00 ± 1.00"]


def test_a_single_model_that_began_far_from_converged_is_told_so(tmp_path):
    for name, values in (("near", [30.0, 28.0]), ("far", [40.0, 30.0])):
        runs = [write_run(tmp_path / name / str(seed), values, stream=text_stream(2), seed=seed) for seed in (1, 2)]
        found = tables(runs)
        ratio = values[1] / values[0]
        assert [float(row["last/first"]) for row in rows(found["perplexity"])] == [pytest.approx(ratio)] * 2
        for table in ("summary", "seeds"):
            assert f"{ratio:.3f} ± 0.000" in texts(found[table])[0]
            said = "Far from converged at the first arrivals (below 0.8): SM_w1, 4 experts (0.75)"
            assert (said in found[table].notes) == (name == "far")
    waiting = tables([write_run(tmp_path / "W", [9.0], stream=text_stream(2), wait=2)])["summary"]
    assert texts(waiting)[0][waiting.header.index("last/first")] == "–" and "Far from" not in waiting.notes


def test_sequential_learning_stands_beside_its_control(tmp_path):
    runs = [
        write_run(tmp_path / "seq", [30.0, 28.0, 26.0, 25.0], "ens", num_members=(2,)),
        write_run(tmp_path / "iid3", [25.5], "ens", num_members=(2,), iid=3),
        write_run(tmp_path / "iid4", [24.5], "ens", num_members=(2,), iid=4),
        write_run(tmp_path / "other", [20.0], "ens", num_members=(4,), iid=4),
    ]
    found = tables(runs)
    assert texts(found["iid"]) == [["Ens_w1", "4@2", "25.50", "26.00", "24.50", "25.00"]]
    assert [row["learner"] for row in rows(found["summary"])] == ["Ens_w1"]
    again = [write_run(tmp_path / f"seq-{seed}", [30.0, 28.0, 26.0, 25.0], seed=seed) for seed in (1, 2)]
    again += [write_run(tmp_path / f"iid-{seed}", [20.0], iid=2, seed=seed) for seed in (1, 2)]
    seeds = tables(again)["seeds"]
    assert "20.00 ± 0.00" in seeds.markdown() and not any(cell.is_best for row in seeds.rows for cell in row)


def test_growth_of_many_steps_is_one_row_for_each_run(tmp_path):
    stream = image_stream(40)
    run = write_run(tmp_path / "R", stream=stream, learner="gmoe", num_experts=range(2, 42))
    found = tables([run])["growth"]
    assert [row[:3] for row in texts(found)] == [["gMoE_w1", "39 steps", "2 to 41"]]
    assert len(rows(found)) == 39


def test_the_papers_numbers_stand_beside_those_of_the_same_learners(tmp_path):
    def run(name, values, experts, **options):
        train_options = {"--arch": "alma_switch_lm", "--num-experts": f"{experts}"}
        return write_run(tmp_path / name, values, num_experts=(experts,), train_options=train_options, **options)

    runs = [
        run("sm4", [40.0, 36.0, 34.0, 32.0], 4),
        run("sm12", [36.0, 30.0, 27.0, 24.0], 12),
        run("ens", [36.0, 30.0, 27.0, 25.0], 4, learner="ens", num_members=(2,)),
        run("ens-iid", [24.0], 4, learner="ens", num_members=(2,), iid=4),
    ]
    found = tables(runs, paper=True)
    by_name = {(row["learner"], row["experts"]): row for row in rows(found["paper"])}
    assert len(by_name) == 15  # the base half of Table 2
    row = by_name["SM_w1", "12"]
    assert (row["paper t3"], row["our final PPL"], row["ours, of SM_w1"]) == ("23.78", "24.0", "0.75")
    assert float(row["paper, of SM_w1"]) == pytest.approx(23.78 / 26.53)
    assert by_name["SM_w1", "8"]["our final PPL"] == ""
    (control,) = rows(found["paper_iid"])
    assert (control["k"], control["paper iid"], control["our seq."]) == ("4", "24.13", "25.0")
    assert "paper" not in tables(runs)


def paper_rows(runs):
    return [row for row in rows(tables(runs, paper=True)["paper"]) if row["our final PPL"]]


def test_what_the_paper_does_not_do_stands_for_none_of_its_rows(tmp_path):
    arch = {"--arch": "alma_switch_lm", "--num-experts": "4"}
    plain = write_run(tmp_path / "plain", [40.0, 36.0, 34.0, 30.0], train_options=arch)
    carried = write_run(tmp_path / "carried", [30.0, 20.0, 12.0, 11.0], train_options=arch, carry_optimizer=True)
    for runs in ([plain, carried], [carried, plain]):
        assert [row["our final PPL"] for row in paper_rows(runs)] == ["30.0"]
    slow = write_run(tmp_path / "slow", [40.0, 37.0, 36.0, 35.0], train_options={**arch, "--lr": "0.1"})
    both = paper_rows([plain, slow])
    assert [(row["options"], row["our final PPL"], row["ours, of SM_w1"]) for row in both] == [
        ("", "30.0", ""), ("'--lr 0.1", "35.0", ""),
    ]  # fmt: skip


def test_a_model_that_is_called_large_stands_beside_the_papers_large(tmp_path):
    run = write_run(tmp_path / "R", train_options={"--arch": "alma_switch_lm_large", "--num-experts": "4"})
    assert [row["size"] for row in paper_rows([run])] == ["large"]


def test_a_run_that_is_still_going_has_no_best_final_value(tmp_path):
    done = write_run(tmp_path / "done", [30.0, 31.0, 30.0, 30.0])
    half = write_run(tmp_path / "half", [35.0, 29.0], learner="ens")
    found = tables([done, half])["perplexity"]
    assert [cell.text for row in found.rows for cell in row if cell.is_best] == ["30.00", "29.00"]  # at t0 and t1
    assert {row["final PPL"] for row in rows(found)} == {"30.0", "29.0"}


def test_streams_of_other_lengths_are_other_experiments_whose_sums_do_not_compare(tmp_path):
    short = write_run(tmp_path / "short", [40.0, 30.0], stream=text_stream(2))
    longer = text_stream(2) | {"num_megabatches": 4}
    runs = [short, write_run(tmp_path / "long", [40.0, 30.0, 25.0, 20.0], stream=longer, seed=2)]
    for found in (tables(runs)[name] for name in ("perplexity", "summary")):
        assert {row[found.header.index("avg PPL")].text for row in found.rows} == {"35.00", "28.75"}
        assert not {cell.text for row in found.rows for cell in row if cell.is_best} & {"35.00", "28.75"}
    assert [row["options"] for row in rows(tables(runs)["summary"])] == ["mega-batches 2", "mega-batches 4"]


def test_text_and_images_have_tables_of_their_own(tmp_path):
    runs = [write_run(tmp_path / "T"), write_run(tmp_path / "I", stream=image_stream())]
    assert list(tables(runs)) == ["perplexity", "summary", "error", "summary_images"]


def test_sizes_and_options_have_columns_only_where_runs_differ_in_them(tmp_path):
    arch = {"--arch": "alma_switch_lm"}
    one = write_run(tmp_path / "A", train_options={**arch, "--decoder-embed-dim": "64", "--lr": "1"})
    other = write_run(tmp_path / "B", train_options={**arch, "--decoder-embed-dim": "96", "--lr": "1"})
    faster = write_run(tmp_path / "C", train_options={**arch, "--decoder-embed-dim": "96", "--lr": "2"})
    assert tables([one])["summary"].header[:2] == ["learner", "experts"]
    assert tables([one, other])["summary"].header[:3] == ["learner", "size", "experts"]
    found = tables([one, other, faster])["summary"]
    assert [row[:3] for row in texts(found)] == [
        ["SM_w1", "width 64", ""], ["SM_w1", "width 96", "--lr 1"], ["SM_w1", "width 96", "--lr 2"],
    ]  # fmt: skip
