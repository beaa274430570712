import json

import pytest

from fairseq_alma.report.paper_numbers import table1, table2


def test_the_tables_have_all_rows_of_the_paper():
    rows = table2()
    assert len(rows) == 30
    first, last = rows[0], rows[-1]
    assert (first.size, first.learner, first.experts, first.ppl) == ("base", "SM_w1", "4", (28.57, 27.45, 26.91, 26.53))
    assert first.num_params == (65_000_000,) * 4
    assert (last.size, last.learner, last.final) == ("large", "gMoE_w1", 20.15)
    assert last.num_params == (210_000_000, 266_000_000, 323_000_000, 436_000_000)
    assert [(row.size, row.iid[4], row.sequential[4]) for row in table1()] == [
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
    assert [[row.learner, row.ppl] for row in table2()] == expected
