import json

import pytest

from fairseq_alma.report.paper import paper_runs, paper_tables


def test_the_tables_have_all_rows_of_the_paper():
    rows = paper_tables().table2
    assert len(rows) == 30
    first, last = rows[0], rows[-1]
    assert (first.size, first.learner, first.experts, first.ppl) == ("base", "SM_w1", "4", (28.57, 27.45, 26.91, 26.53))
    assert first.num_params == (65_000_000,) * 4
    assert (last.size, last.learner, last.final) == ("large", "gMoE_w1", 20.15)
    assert last.num_params == (210_000_000, 266_000_000, 323_000_000, 436_000_000)
    assert [(row.size, row.iid[4], row.sequential[4]) for row in paper_tables().table1] == [
        ("base", 24.13, 24.35), ("large", 17.88, 18.92),
    ]  # fmt: skip


def test_the_tables_are_those_of_the_text_that_the_project_goes_by(checkout):
    source = checkout.parent / "shared" / "paper" / "tables.json"
    if not source.is_file():
        pytest.skip("needs ../shared/paper/tables.json")
    expected = [
        [row["learner"], tuple(row["ppl"])]
        for size in json.loads(source.read_text())["table2_language_modeling"].values()
        for row in size["rows"]
    ]
    assert [[row.learner, row.ppl] for row in paper_tables().table2] == expected


@pytest.fixture
def rows():
    return {(run.backbone, run.label, run.experts): run for run in paper_runs().facts.itertuples()}


def test_the_papers_learners_that_do_not_wait_are_there_in_both_sizes(rows):
    assert len(rows) == 14
    assert rows["base", "SM_w1", "4"].anytime == pytest.approx((28.57 + 27.45 + 26.91 + 26.53) / 4)
    assert all(run.is_complete for run in rows.values())


def test_compute_follows_from_the_costs_that_the_paper_states(rows):
    # 42 GFLOPs a sequence, 192 sequences, 120,000 updates, 4 mega-batches, three times for training
    single = rows["base", "SM_w1", "4"].computation
    assert single == pytest.approx(3 * 42e9 * 192 * 120_000 * 4)
    assert rows["base", "Ens_w1", "4@2"].computation == pytest.approx(2 * single)
    assert rows["base", "gEns_w1", "4@1, 4@2, 4@3, 4@4"].computation == pytest.approx(single)
    assert rows["large", "SM_w1", "12"].computation == pytest.approx(3 * single)


def test_growing_learners_grow(rows):
    arrivals = paper_runs().arrivals
    growing = arrivals[arrivals.run == rows["large", "gMoE_w1", "4, 6, 8, 12"].Index]
    assert list(growing.num_params) == [210e6, 266e6, 323e6, 436e6]
