"""What a report calls a run: its label, its variant and how it was trained; and how it writes a table."""

import csv
import io

import pytest
from pandas import DataFrame

from fairseq_alma.report.finding import Spread
from fairseq_alma.report.spelling import (
    NOTHING,
    Cell,
    Table,
    label_of,
    mark_best,
    render_markdown,
    setting_of,
    show_count,
    show_number,
    show_power,
    variant_of,
)

OPTIONS = {"wait": 10, "replay": False, "drop_rest": False, "iid": None, "keep_checkpoints": True, "init": "previous"}
TRAINING = {"--arch": "alma_mlp", "--optimizer": "adadelta", "--lr": "1.0", "--max-epoch": "100", "--width": "4"}
BY_ACCURACY = {"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"}


def run(learner="sm", training=None, preset="paper", overridden=(), kind="images", **options):
    return {
        "learner": learner, "stream": {"kind": kind}, "options": {**OPTIONS, **options},
        "train_options": {**TRAINING, **(training or {})}, "preset": {"name": preset, "overridden": [*overridden]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "label", "variant"),
    [
        ({}, "SM_w10", "SM"),
        ({"wait": 1, "replay": True}, "SM_w1 replay", "SM"),
        ({"learner": "ens", "num_members": 5, "combine": "vote"}, "Ens_w10 vote", "Ens vote"),
        ({"learner": "ens", "num_members": 3, "combine": "vote"}, "Ens_w10 vote", "Ens vote --num-members 3"),
        ({"stage_average": "mean"}, "SM_w10", "SM --stage-average mean"),
        ({"learner": "gens", "init": "scratch", "num_members": 1}, "gEns_w10", "gEns"),
        ({"learner": "gens", "num_members": 1}, "gEns_w10 previous", "gEns previous"),
        (
            {"learner": "gens", "num_members": 1, "combine": "logits", "preset": "released-code"},
            "gEns_w10 (released code)", "gEns",
        ),
        (
            {"learner": "gens", "num_members": 1, "combine": "logits", "init": "scratch", "preset": "released-code",
             "overridden": ["--init"]},
            "gEns_w10 scratch (released code)", "gEns scratch",
        ),
    ],
)  # fmt: skip
def test_what_is_not_usual_is_told(given, label, variant):
    assert (label_of(run(**given)), variant_of(run(**given))) == (label, variant)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({}, ""),
        ({"training": {"--lr": "1", "--least-gain": "0", "--cpu": "", "--num-experts": "2", "--gate": "hard"}}, ""),
        ({"training": {"--lr": "0.1", "--patience": "9"}}, "--lr 0.1, --patience 9"),
        ({"training": {"--max-epoch": "30"}}, "--max-epoch 30"),
        ({"training": {"--optimizer": "sgd"}}, "--optimizer sgd"),
        ({"training": {"--arch": "alma_vgg", "--optimizer": "sgd", "--lr": "0.01", "--momentum": "0.9"}}, ""),
        ({"training": {"--lr": "0.1"}, "kind": "text"}, ""),
        ({"training": BY_ACCURACY, "preset": "released-code"}, "released code"),
        (
            {"training": {**BY_ACCURACY, "--select": "loss"}, "preset": "released-code", "overridden": ["--select"]},
            "released code, --select loss",
        ),
        ({"training": {**BY_ACCURACY, "--max-epoch": "5"}, "preset": "released-code"}, "released code, --max-epoch 5"),
        (
            {"learner": "gens", "training": BY_ACCURACY, "preset": "released-code", "overridden": ["--init"],
             "init": "scratch", "combine": "logits"},
            "released code, --init scratch",
        ),
    ],
)  # fmt: skip
def test_how_images_are_trained_on_is_told_where_it_is_not_the_papers_way(given, setting):
    assert setting_of(run(**given)) == setting


def test_a_markdown_table_is_aligned():
    text = render_markdown(["learner", "t0"], [[Cell("SM_w1"), Cell("28.57")], [Cell("gEns"), Cell("*")]])
    assert text == (
        "| learner |    t0 |\n"
        "|---------|------:|\n"
        "| SM_w1   | 28.57 |\n"
        "| gEns    |     * |\n"
    )  # fmt: skip


def test_a_csv_table_has_full_numbers_and_empty_cells_for_missing_ones():
    row = {"a": "x, y", "b": Cell("1.2", 1.23456789), "c": Cell("*"), "d": Cell("–", float("nan"))}
    text = Table("name", "title", "notes", DataFrame([row])).csv()
    assert list(csv.reader(io.StringIO(text))) == [["a", "b", "c", "d"], ["x, y", "1.23456789", "", ""]]


def test_numbers_are_spelled_for_people():
    assert [show_number(value, 2) for value in (1234.5, None, float("nan"))] == ["1,234.50", "*", "–"]
    assert [show_count(value) for value in (12, 1721088, 65.4e6, 436e6, 1.2e9, None)] == [
        "12", "1.72M", "65.4M", "436M", "1.2G", "–",
    ]  # fmt: skip
    assert (show_power(3.616e11), show_power(0)) == ("3.62e+11", "0")


def test_a_latex_table_escapes_what_latex_would_read_as_a_command():
    rows = [["SM_w1 & \\x", Cell("24.3 ± 0.1", 24.3, True)], ["*", Cell("3.62e+11", 3.62e11)]]
    table = Table("name", "title", "notes", DataFrame(rows, columns=["a_b", "%"]))
    assert table.latex().splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & \% \\",
        r"\midrule",
        r"SM\_w1 \& \textbackslash{}x & \textbf{24.3 $\pm$ 0.1} \\",
        r"$\ast$ & $3.62\times 10^{11}$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_cells_that_read_the_same_are_best_together():
    rows = [{"t0": cell} for cell in (Cell("1.00", 1.001), Cell("1.00", 1.0), Cell("2.00", 2.0), Cell("0.50", 0.5))]
    mark_best(rows[:3], ["t0"])
    assert [row["t0"].is_best for row in rows] == [True, True, False, False]


def test_a_deviation_has_a_column_of_its_own_in_a_csv_table():
    cells = [{"t0": Cell("2.0 ± 1.0", Spread.of({1: 1.0, 2: 3.0}))}, {"t0": Cell("5.0", Spread.of({1: 5.0}))}]
    cells.append({"t0": NOTHING})
    table = Table("name", "title", "notes", DataFrame(cells), mean="{} mean")
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["t0 mean", "t0 deviation"], ["2.0", "1.4142135623730951"], ["5.0", ""], ["", ""],
    ]  # fmt: skip


def test_a_name_that_a_spreadsheet_would_compute_is_kept_from_it_and_a_number_stays():
    row = {"run": "=1+1", "options": "@x", "gap": Cell("-2.0%", -0.02)}
    text = Table("name", "title", "notes", DataFrame([row])).csv()
    assert list(csv.reader(io.StringIO(text)))[1] == ["'=1+1", "'@x", "-0.02"]


def test_a_bar_in_a_cell_does_not_end_it_in_markdown():
    assert render_markdown(["a|b"], []).splitlines()[0] == r"| a\|b |"
