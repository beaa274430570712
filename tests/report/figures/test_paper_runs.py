import pytest

from fairseq_alma.report.figures.paper_runs import paper_runs


@pytest.fixture
def rows():
    return {(run.size, run.label, run.experts): run for run in paper_runs()}


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
    assert rows["large", "gMoE_w1", "4, 6, 8, 12"].num_params == {0: 210e6, 1: 266e6, 2: 323e6, 3: 436e6}
