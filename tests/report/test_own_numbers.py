"""A single run on text is described in words that its figures decide."""

import math

import pytest

from fairseq_alma.report.write_report import Report, own_numbers
from tests.report.fakes import image_stream, table_of, write_run


def said(root):
    return dict(own_numbers(table_of([root])))


def write_log(root, stage, ppl):
    """The last training log of a stage, as fairseq writes it: losses in bits."""
    lines = [f'x | INFO | train | {{"epoch": 1, "train_loss": "{math.log2(each)}"}}\n' for each in (3 * ppl, ppl)]
    (root / f"stage-{stage:03d}" / "train-member-0.log").write_text("".join(lines))


def test_the_newest_figures_and_the_gain_of_the_last_update_are_named(tmp_path):
    numbers = said(write_run(tmp_path / "R", values=[40.0, 30.0, 27.0], num_stages=3))
    assert "after mega-batch 3 of 4" in numbers["Newest"] and "perplexity 27.00" in numbers["Newest"]
    assert f"{math.log2(27) * 100 / 400:.3f} bits per byte" in numbers["Newest"]
    assert "10.0 % lower" in numbers["Last update"]


def test_the_next_perplexity_lies_on_the_line_of_the_last_two(tmp_path):
    values = [100 * (t + 1) ** -0.1 for t in range(4)]
    assert f"perplexity {100 * 4**-0.1:.2f}" in said(write_run(tmp_path / "R", values=values, num_stages=3))["Forecast"]


@pytest.mark.parametrize("values", [[40.0], [40.0, 41.0], [40.0, 20.0], [40.0, math.inf]])
def test_nothing_is_foretold_from_one_update_nor_from_one_that_did_harm_or_much(values, tmp_path):
    assert "Forecast" not in said(write_run(tmp_path / "R", values=values, num_stages=len(values)))


@pytest.mark.parametrize(("train", "words"), [(20.0, "much of it"), (28.5, "some of it"), (30.0, "hardly any of it")])
def test_the_training_loss_beside_the_test_loss_says_what_would_help(train, words, tmp_path):
    root = write_run(tmp_path / "R", values=[40.0, 30.0], num_stages=2)
    assert "Training text" not in said(root)
    write_log(root, 1, train)
    assert words in said(root)["Training text"] and f"perplexity {train:.2f} in its last" in said(root)["Training text"]


def test_several_runs_images_and_a_run_without_an_update_have_no_such_section(tmp_path):
    roots = [write_run(tmp_path / name, num_stages=2) for name in "AB"]
    assert own_numbers(table_of(roots)) == []
    assert said(write_run(tmp_path / "C", stream=image_stream(), num_stages=1)) == {}
    assert said(write_run(tmp_path / "D", num_stages=0)) == {}


def test_page_and_terminal_begin_with_them(tmp_path):
    report = Report(table_of([write_run(tmp_path / "R", values=[40.0, 30.0], num_stages=2)]))
    assert report.text().startswith("Newest: after mega-batch 2 of 4")
    page = report.page([], tmp_path)
    assert page.index('id="own"') < page.index('id="findings"') and "after mega-batch 2 of 4" in page
